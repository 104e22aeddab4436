"""Calls to a job server that survive its restarts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from typing import Any, TypeVar

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from protos.errors import TimedOut, Unavailable, WrongState
from protos.rpc.channel import SERVER_TOKEN, open_channel, require_unforked
from protos.rpc.statuses import fault_of
from protos.rpc.transport import STREAM_OPEN, backoff

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")

# A restarting server is back within this time. A unary call waits this long before its retry; a
# stream waits `patience_seconds`.
_RESTART_SECONDS = 1.5
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0


class ServerConnection:
    """A channel to one job server; see DistillClient for the arguments. Safe to share."""

    def __init__(self, address: str, *, timeout: float, patience_seconds: float) -> None:
        self.name = f"distill server {address}"
        self.channel = open_channel(address, token=SERVER_TOKEN)
        self._streams: set[grpc.Call] = set()
        self._is_cancelled = False
        self._is_closed = False
        self._timeout = timeout
        self._patience = patience_seconds

    def cancel(self) -> None:
        """End all streams, also those that other threads read. Later calls raise WrongState."""
        self._is_cancelled = True
        for stream in [*self._streams]:
            stream.cancel()

    def close(self) -> None:
        """End all streams and close the channel."""
        self._is_closed = True
        self.cancel()
        self.channel.close()

    def require_usable(self) -> None:
        """Raise WrongState if the connection is closed or cancelled, or if the parent process
        opened the connection.
        """
        require_unforked()
        if self._is_closed:
            raise WrongState(
                f"the client of the {self.name} is closed",
                hint="make a new client, and get the job from it",
            )
        if self._is_cancelled:
            raise WrongState("the call was cancelled")

    @contextmanager
    def stream(self, call: grpc.Call) -> Iterator[None]:
        """Let `cancel` end the stream during the block. The stream ends with the block."""
        self._streams.add(call)
        try:
            if self._is_cancelled:
                call.cancel()
            yield
        finally:
            call.cancel()
            self._streams.discard(call)

    def call(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Answer],
        request: _Request,
        *,
        retry: bool = True,
    ) -> _Answer:
        """Make a unary call within the timeout, and retry once if the server cannot be reached.

        `retry` enables the retry. An Unavailable error with a field is not retried: the server sent
        this error because it could not reach a job's teacher.
        """
        self.require_usable()
        deadline = time.monotonic() + self._timeout
        try:
            return method(request, timeout=self._timeout)
        except grpc.RpcError as error:
            fault = fault_of(error, self.name)
            if not retry or not isinstance(fault, Unavailable) or fault.field:
                raise fault from error
        self.require_usable()
        patience = max(0.001, min(_RESTART_SECONDS, deadline - time.monotonic()))
        try:
            return method(request, timeout=patience, wait_for_ready=True)
        except grpc.RpcError as error:
            retry_fault = fault_of(error, self.name)
            raise fault if isinstance(retry_fault, TimedOut) else retry_fault from error

    def resuming(self, work: Callable[[], _Answer], progress: Callable[[], object]) -> _Answer:
        """Return the result of `work`, which is called again after each loss of the server.

        `work` must continue where it stopped. Raises Unavailable if the server cannot be reached,
        or `progress()` does not change, for the patience of the client.
        """
        away_since, last_progress, failures = 0.0, progress(), 0
        while True:
            try:
                return work()
            except Unavailable as fault:
                failed_at, current_progress = time.monotonic(), progress()
                if not away_since or current_progress != last_progress:
                    away_since, last_progress, failures = failed_at, current_progress, 0
                if fault.field or failed_at - away_since > self._patience:
                    raise
            failures += 1
            time.sleep(backoff(failures, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS))
            self._wait_for_server(away_since + self._patience)

    def lasting(
        self, open_stream: Callable[[], Iterator[_Answer]], deadline: float | None = None
    ) -> Iterator[_Answer]:
        """Yield the messages of a stream. Reopen the stream after each loss of the server.

        `open_stream` must continue after the last received message.
        """
        away_since: float | None = None
        failures = 0
        while True:
            self.require_usable()
            # Any: grpc's types do not say that a response iterator is also a grpc.Call.
            call: Any = open_stream()
            try:
                with self.stream(call):
                    if STREAM_OPEN in call.initial_metadata():
                        away_since, failures = None, 0
                    yield from call
                    return
            except grpc.RpcError as error:
                away_since = away_since or time.monotonic()
                fault = fault_of(error, self.name)
                out_of_patience = time.monotonic() - away_since > self._patience
                is_final = self._is_cancelled or not isinstance(fault, Unavailable)
                if out_of_patience or is_final:
                    raise fault from error
            failures += 1
            time.sleep(backoff(failures, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS))
            self._wait_for_server(min(deadline or inf, away_since + self._patience))

    def _wait_for_server(self, deadline: float) -> None:
        """Wait at most a few seconds for a connection.

        The wait is short because a server that crashes repeatedly may be reachable only briefly.
        """
        seconds = min(_LONGEST_PAUSE_SECONDS, max(0.001, deadline - time.monotonic()))
        # Any answer means that the connection is up. A channel_ready_future would leave a thread
        # that raises an error if the channel is closed meanwhile.
        with suppress(grpc.RpcError, ValueError):  # the latter: the channel is closed
            HealthStub(self.channel).Check(
                HealthCheckRequest(), timeout=seconds, wait_for_ready=True
            )

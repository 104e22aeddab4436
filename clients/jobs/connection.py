"""Calls to a job server that continue after a restart of the server."""

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
    """A channel to one job server. Several threads can share it. Arguments: see DistillClient."""

    def __init__(self, address: str, *, timeout: float, patience_seconds: float) -> None:
        self.name = f"distill server {address}"
        self.channel = open_channel(address, token=SERVER_TOKEN)
        self._streams: set[grpc.Call] = set()
        self._is_cancelled = False
        self._is_closed = False
        self._timeout = timeout
        self._patience = patience_seconds

    def cancel(self) -> None:
        """End all streams, including those that other threads read.

        Later calls raise WrongState.
        """
        self._is_cancelled = True
        for stream in [*self._streams]:
            stream.cancel()

    def close(self) -> None:
        """End all streams and close the channel."""
        self._is_closed = True
        self.cancel()
        self.channel.close()

    def require_usable(self) -> None:
        """Raise WrongState if the connection cannot be used.

        This is so after `close` or `cancel`, and in a process that was forked after the connection
        opened.
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
        """Register the open stream `call` during the block, so that the method `cancel` also ends
        it.

        The end of the block ends the stream.
        """
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
        """Make a unary call within the timeout, and return the server's answer.

        If the server cannot be reached and `retry` is True, the call is sent once more. An
        Unavailable error that names a field is not retried: the server sent this error, because the
        server could not reach a job's teacher.
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
        """Call `work`, again after each loss of the server, until it succeeds. Return its result.

        - `work`: makes calls; a later call of `work` must continue where the earlier one stopped
        - `progress`: returns a value that changes whenever `work` has progressed

        Raises Unavailable if, for the client's `patience_seconds`, the server cannot be reached or
        the progress does not change.
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
        """Yield the messages of a stream. Open the stream again after each loss of the server.

        - `open_stream`: opens the stream, which must begin after the last received message
        - `deadline`: monotonic time in seconds, at which a wait for the server ends; None: no limit

        Raises Unavailable if the server cannot be reached for the client's `patience_seconds`.
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
        """Wait for a connection: at most a few seconds, and not after `deadline` (monotonic time).

        The wait is short because a server that crashes repeatedly may be reachable only briefly.
        """
        seconds = min(_LONGEST_PAUSE_SECONDS, max(0.001, deadline - time.monotonic()))
        # Any answer means that the connection is up. A channel_ready_future would leave a thread
        # that raises an error if the channel is closed meanwhile.
        with suppress(grpc.RpcError, ValueError):  # the latter: the channel is closed
            HealthStub(self.channel).Check(
                HealthCheckRequest(), timeout=seconds, wait_for_ready=True
            )

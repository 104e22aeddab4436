"""Connects to one rollout service, and requests a part of an order with retries.

The class `EngineClient` (`engine_client.py`) describes the rules for retries.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc

from clients.preflight.rollouts import FIELD, not_rollouts
from clients.runs.started_services import PlacedAddress
from protos import rollouts_pb2, rollouts_pb2_grpc
from protos.errors import DistillError, Overloaded, Unavailable
from protos.rpc.channel import ROLLOUTS_TOKEN, open_channel, open_cluster_channel
from protos.rpc.statuses import TLS_HINT, fault_of
from protos.rpc.transport import STREAM_OPEN
from student_trainer.rollout_client.order import Order
from student_trainer.rollout_client.wire import SampledReader, order_parts
from student_trainer.rollouts.sampler import SampledTokens

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
_MAX_PAUSE_SECONDS = 1.0
_SLEEP_SECONDS = 60.0  # with adapters, the weights of a model are copied to the CPU
# The service died, stopped or does not answer.
_AWAY_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class Replica:
    """The gRPC channel to one rollout service.

    It connects when it is first used, and connects again if the service moves to another address.

    proven: True if a rollout service has answered at the address, or if the job's runner has
    started one.
    """

    def __init__(self, address: str | PlacedAddress) -> None:
        self.address = str(address)
        self._placed = address if isinstance(address, PlacedAddress) else None
        self.name = f"rollout service {'' if self._placed else 'at '}{address}"
        self.proven = self.is_placed
        self._lock = threading.Lock()
        self._current_address = ""
        self._channel: grpc.Channel | None = None
        self._metadata: tuple[tuple[str, str], ...] = ()
        if isinstance(address, str):
            self._channel = open_channel(address, token=ROLLOUTS_TOKEN)

    @property
    def is_placed(self) -> bool:
        """True if the runner of the job starts this service on its cluster."""
        return self._placed is not None

    def request_info(self) -> Any:
        """Start a gRPC call for the service's info, with a deadline of 5 s, and return the call.

        Raises Unavailable if the job's runner has not started the service yet.
        """
        request = rollouts_pb2.GetRolloutInfoRequest()
        stub, metadata = self._connect()
        return stub.GetRolloutInfo.future(
            request, timeout=CONNECT_SECONDS, wait_for_ready=True, metadata=metadata
        )

    def sleep(self) -> Any:
        """Start a gRPC call that frees the memory of the service's GPUs, and return the call.

        Raises the errors of `request_info`.
        """
        stub, metadata = self._connect()
        return stub.Sleep.future(
            rollouts_pb2.SleepRequest(), timeout=_SLEEP_SECONDS, metadata=metadata
        )

    def sample(self, messages: Sequence[rollouts_pb2.OrderPart]) -> Any:
        """Start a gRPC call that samples an order, and return the call.

        Raises the errors of `request_info`.
        """
        stub, metadata = self._connect()
        return stub.Sample(iter(messages), metadata=metadata)

    def _connect(self) -> tuple[rollouts_pb2_grpc.RolloutsStub, tuple[tuple[str, str], ...]]:
        """Return a stub for the current address of the service, and the metadata for its calls."""
        with self._lock:
            if (
                self._placed is not None
                and (address := self._placed.locate()) != self._current_address
            ):
                if self._channel is not None:
                    self._channel.close()  # ends the calls to the old address
                self._channel, self._metadata = open_cluster_channel(address, token=ROLLOUTS_TOKEN)
                self._current_address = address
            assert self._channel is not None
            return rollouts_pb2_grpc.RolloutsStub(self._channel), self._metadata

    def fault_of(self, error: grpc.RpcError) -> DistillError:
        """Return the error of a failed call.

        The error Unavailable means that another replica may be able to process the call.
        """
        call: Any = error
        if call.code() is grpc.StatusCode.UNIMPLEMENTED:
            if not self.proven:
                return not_rollouts(self.address)
            # A proxy or a gateway answers while the service or its machine is down.
            hint = "check that the service runs"
            message = f"another program answers in place of the {self.name}"
            return Unavailable(message, field=FIELD, hint=hint)
        fault = fault_of(error, self.name)
        if call.code() in _AWAY_CODES and not isinstance(fault, Unavailable):
            return Unavailable(f"the {self.name} has ended a call", field=FIELD, hint=fault.hint)
        return fault

    def close(self) -> None:
        """Close the channel, which cancels its calls."""
        if self._channel is not None:
            self._channel.close()


def no_answer(replicas: Sequence[Replica], last_error: DistillError, seconds: float) -> Unavailable:
    """Return the error for services that did not answer for `seconds`.

    `last_error`: the error of the last attempt.
    """
    addresses = ", ".join(replica.address for replica in replicas)
    if any(replica.is_placed for replica in replicas):
        return Unavailable(
            f"no rollout engine of the job answers for {seconds:g} s (last: {last_error.message})",
            field="rollouts.gpus",
            hint="read the logs rollouts-N.log of the attempt",
        )
    tls = any(replica.address.startswith("https://") for replica in replicas)
    return Unavailable(
        f"no rollout service answers at {addresses} for {seconds:g} s (last: {last_error.message})",
        field=FIELD,
        hint=TLS_HINT if tls else "start a service with distill-rollouts, or check the address",
    )


class PartRequest:
    """A thread that sends a part of an order to one replica after another until it is complete.

    - deliver: called in this thread with (index in the part, tokens), once for each sequence.
    - on_done: called at the end with None if the part is complete, otherwise with the error.
    """

    def __init__(
        self,
        order: Order,
        ring: Sequence[Replica],
        *,
        patience_seconds: float,
        vocab_size: int | None,
        deliver: Callable[[int, SampledTokens], None],
        on_done: Callable[[Exception | None], None],
    ) -> None:
        """Start the thread. `ring`: the replicas, in the order in which the thread tries them."""
        self.accepted = threading.Event()  # set if a replica has accepted it, or `error` is set
        self.error: Exception | None = None
        self._order = order
        self._messages = order_parts(order)
        self._ring = ring
        self._patience_seconds = patience_seconds
        self._vocab_size = vocab_size
        self._deliver = deliver
        self._on_done = on_done
        self._delivered: set[int] = set()
        self._last_fault: DistillError | None = None  # of the last call that did not time out
        self._away_seconds = 0.0  # time since the last message during which no replica had the part
        self._cancelled = threading.Event()
        self._reason: DistillError | None = None
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name="rollout-order", daemon=True)
        self._thread.start()

    def cancel(self, reason: DistillError | None = None) -> None:
        """Cancel the call. `on_done` then receives `reason`. Use `join` to wait for the end."""
        self._reason = self._reason or reason
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._send_until_complete()
        except Exception as error:  # noqa: BLE001 (the order raises it)
            self.error = error
        self.accepted.set()
        self._on_done(self.error)

    def _send_until_complete(self) -> None:
        failures, last_message = 0, ""
        while not self._cancelled.is_set():
            replica = self._ring[failures % len(self._ring)]
            fault = self._send(replica)
            if fault is None:
                return
            if self._cancelled.is_set():
                break
            if not isinstance(fault, Overloaded | Unavailable):
                raise fault
            if self._away_seconds >= self._patience_seconds:
                raise no_answer(self._ring, fault, self._patience_seconds)
            if str(fault) != last_message:
                log.warning("%s; the order is sent again", fault)
            failures, last_message = failures + 1, str(fault)
            self._pause(fault, failures // len(self._ring))
        raise self._reason or Unavailable("the order was cancelled")

    def _pause(self, fault: DistillError, rounds: int) -> None:
        seconds = min(_MAX_PAUSE_SECONDS, 0.05 * 2 ** min(rounds, 10))
        if isinstance(fault, Overloaded):
            # The replica is alive, and the order may wait until other orders are sampled.
            seconds, self._away_seconds = fault.retry_after_ms / 1000, 0.0
        else:
            self._away_seconds += seconds
        self._cancelled.wait(seconds * random.uniform(0.5, 1.0))

    def _send(self, replica: Replica) -> DistillError | None:
        """Send the part to a replica. Return None if the part is complete, otherwise the error."""
        start_time = time.monotonic()
        try:
            self._call = call = replica.sample(self._messages)
        except Unavailable as fault:  # the service is not placed
            return fault
        if self._cancelled.is_set():  # `cancel` may have missed this call
            call.cancel()
        # A frozen replica leaves time for the other replicas.
        share_seconds = self._patience_seconds / len(self._ring)
        remaining_seconds = max(0.0, self._patience_seconds - self._away_seconds)
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            call.cancel()

        impatience = threading.Timer(min(share_seconds, remaining_seconds), give_up)
        impatience.start()
        try:
            metadata = call.initial_metadata()  # blocks until a message or an error comes
            impatience.cancel()
            self._away_seconds += time.monotonic() - start_time
            if STREAM_OPEN[0] in dict(metadata or ()):
                replica.proven = True
                self.accepted.set()
            return self._receive(call)
        except grpc.RpcError as error:
            if not is_late.is_set():
                self._last_fault = replica.fault_of(error)
                return self._last_fault
            # A timed-out call has no reason; the previous call may have given one.
            if isinstance(self._last_fault, Unavailable):
                return self._last_fault
            return Unavailable(f"the {replica.name} does not answer")
        finally:
            impatience.cancel()
            call.cancel()

    def _receive(self, call: Iterable[rollouts_pb2.SampledPart]) -> DistillError | None:
        reader = SampledReader(self._order, self._vocab_size)
        for message in call:
            sampled = reader.add(message)
            self._last_fault, self._away_seconds = None, 0.0
            if sampled is not None and sampled[0] not in self._delivered:
                self._delivered.add(sampled[0])
                self._deliver(*sampled)
        return None if reader.complete else Unavailable("a rollout service ended an order early")

"""Sends orders to rollout services, and retries them when a service restarts."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import grpc

from clients.preflight.rollouts import FIELD, check_protocol
from clients.runs.started_services import PlacedAddress
from protos import rollouts_pb2
from protos.errors import DistillError, InvalidInput, TimedOut, Unavailable, WrongState
from student_trainer.rollout_client.engine_replica import (
    CONNECT_SECONDS,
    PartRequest,
    Replica,
    no_answer,
)
from student_trainer.rollout_client.order import Order
from student_trainer.rollouts.sampler import SampledTokens

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutServiceInfo:
    """The properties that all services of a client share.

    - max_length: maximum tokens of a sequence; None: no limit.
    - lora_rank: rank of the adapters that snapshots contain; 0: snapshots contain all weights.
    - sleeps: True if `EngineClient.sleep` may be called.
    """

    engine: str
    vocab_size: int
    max_length: int | None
    dtype: str
    lora_rank: int
    sleeps: bool


class EngineClient:
    """Requests sequences from one or several rollout services (replicas). Thread-safe.

    The sequences of an order are divided into contiguous parts, one for each replica. The division
    depends only on the number of sequences, the number of addresses and `rank`. If a replica is
    lost, its whole part is sampled again, by another replica or by the same replica when it
    returns. The hf engine then samples bit-identical sequences. Each sequence is delivered once.

    An order fails with Unavailable, field `rollouts.address`, if for `patience_seconds` no replica
    accepts one of its parts. An accepted part has no time limit as long as the connection lives. If
    a replica returns Overloaded, the part is retried without limit.
    """

    def __init__(
        self,
        addresses: Sequence[str | PlacedAddress],
        *,
        rank: int = 0,
        patience_seconds: float = 60.0,
    ) -> None:
        """Create the channels. A channel connects when it is first used.

        - addresses: the address of each replica.
        - rank: the rank of this trainer process. The first part of an order goes to the replica
          with number `rank` modulo the number of replicas.
        - patience_seconds: how long a part may be without a replica, see the class.

        Raises InvalidInput if there is no address, or if an address cannot be used.
        """
        if not addresses:
            raise InvalidInput("is empty", field=FIELD, hint="give HOST:PORT of a rollout service")
        self._replicas = [Replica(address) for address in addresses]
        self._rank = rank
        self._patience_seconds = patience_seconds
        self._vocab_size: int | None = None
        self._lock = threading.Lock()
        self._closed: DistillError | None = None  # the reason why orders are no longer sent
        self._unfinished: set[Sampling] = set()

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def info(self, vocab_size: int | None = None) -> RolloutServiceInfo:
        """Return the common properties of all replicas.

        Replicas that do not answer within 5 s are logged. `vocab_size`: number of the student's
        logits; None: the vocabulary is not checked. Raises:

        - WrongState: two replicas differ, the vocabulary of a replica differs from the student's,
          or a replica has another protocol than this program.
        - Unavailable: no replica answers.
        - InvalidInput: a server is not a rollout service.
        - Unauthenticated or Forbidden: a token is refused.
        """
        infos: dict[Replica, RolloutServiceInfo] = {}
        # Call all at the same time, so that two absent replicas take 5 s and not 10.
        calls: list[tuple[Replica, Any]] = []
        for replica in self._replicas:
            try:
                calls.append((replica, replica.request_info()))
            except Unavailable as error:
                fault: DistillError = error
                log.warning("%s", fault)
        for replica, call in calls:
            try:
                message = call.result()
                replica.proven = True
                check_protocol(replica.address, message.protocol)
                infos[replica] = _info_of(message)
            except grpc.RpcError as error:
                fault = replica.fault_of(error)
                if not isinstance(fault, Unavailable | TimedOut):
                    raise fault from error
                log.warning("%s", fault)
        if not infos:
            raise no_answer(self._replicas, fault, CONNECT_SECONDS)
        (first, info), *other_infos = infos.items()
        for other_replica, other_info in other_infos:
            if other_info != info:
                raise WrongState(
                    f"the {first.name} has {info}, but the {other_replica.name} has {other_info}",
                    field=FIELD,
                    hint="start all rollout services with the same model and options",
                )
        if vocab_size not in (None, info.vocab_size):
            raise WrongState(
                f"the model of the {first.name} has {info.vocab_size} token ids, the student has"
                f" {vocab_size}",
                field=FIELD,
                hint="start the service with --model set to the job's student.model",
            )
        self._vocab_size = info.vocab_size
        return info

    def sample(self, order: Order) -> Sampling:
        """Send an order, and return an iterator of its sequences, which arrive in the background.

        Blocks until each part runs or is queued at a replica. An error of a part before that is
        raised here. The iterator raises later errors.
        """
        sampling = self.start(order)
        try:
            sampling.wait_until_accepted()
        except BaseException:
            sampling.close()
            raise
        return sampling

    def start(self, order: Order) -> Sampling:
        """Send an order without blocking. Unlike with `sample`, the iterator raises all errors."""
        sampling = Sampling(self._forget_sampling)
        try:
            with self._lock:
                if self._closed is not None:
                    raise self._closed
                self._unfinished.add(sampling)
                self._start_parts(sampling, order)
        except BaseException:
            sampling.close()
            raise
        return sampling

    def sleep(self) -> None:
        """Free the GPU memory of the services until the next order.

        Returns when the memory is free. A service that has an order of another client does not
        sleep. An unreachable service is only logged, because a service that starts again is asleep.
        Raises WrongState if a service does not support sleeping.
        """
        for replica, call in [(replica, replica.sleep()) for replica in self._replicas]:
            try:
                call.result()
            except grpc.RpcError as error:
                fault = replica.fault_of(error)
                if not isinstance(fault, Unavailable | TimedOut):
                    raise fault from error
                log.warning("%s", fault)

    @property
    def is_closed(self) -> bool:
        """True after `close` or `fail`: the client no longer sends orders."""
        return self._closed is not None

    def fail(self, error: DistillError) -> None:
        """Let all running orders and all later orders fail with `error`."""
        with self._lock:
            self._closed = self._closed or error
            unfinished = tuple(self._unfinished)
        for sampling in unfinished:
            sampling.fail(error)

    def close(self) -> None:
        """Cancel all orders, join their threads and close the channels. May be called twice."""
        closed_error = Unavailable("the client of the rollout service is closed")
        with self._lock:
            self._closed = self._closed or closed_error
            unfinished = tuple(self._unfinished)
        for sampling in unfinished:
            sampling.close()
        for replica in self._replicas:
            replica.close()

    def _start_parts(self, sampling: Sampling, order: Order) -> None:
        count, total = len(self._replicas), len(order.sequences)
        for number in range(count):
            first_index, end_index = total * number // count, total * (number + 1) // count
            if first_index < end_index:
                first_replica = (self._rank + number) % count
                sampling.start(
                    replace(order, sequences=order.sequences[first_index:end_index]),
                    first_index,
                    ring=[*self._replicas[first_replica:], *self._replicas[:first_replica]],
                    patience_seconds=self._patience_seconds,
                    vocab_size=self._vocab_size,
                )

    def _forget_sampling(self, sampling: Sampling) -> None:
        with self._lock:
            self._unfinished.discard(sampling)


class Sampling:
    """Iterator over the sequences of one order: (index in the order, tokens).

    The sequences come in order of completion. Iterate only once, in one thread. An error ends the
    iteration. `close` cancels the unfinished parts of the order at the replicas.
    """

    def __init__(self, on_close: Callable[[Sampling], None]) -> None:
        self._on_close = on_close
        self._parts: list[PartRequest] = []
        self._incomplete_parts = 0  # parts that are not complete
        # Sequences, an error, or None for a part that is complete.
        self._results: queue.SimpleQueue[tuple[int, SampledTokens] | Exception | None]
        self._results = queue.SimpleQueue()

    def start(
        self,
        part: Order,
        first: int,
        *,
        ring: Sequence[Replica],
        patience_seconds: float,
        vocab_size: int | None,
    ) -> None:
        """Send a part of the order; see `PartRequest`.

        `first`: the index in the order of the first sequence of the part.
        """
        self._incomplete_parts += 1
        request = PartRequest(
            part,
            ring,
            patience_seconds=patience_seconds,
            vocab_size=vocab_size,
            deliver=lambda index, sampled: self._results.put((first + index, sampled)),
            on_done=self._results.put,
        )
        self._parts.append(request)

    def wait_until_accepted(self) -> None:
        """Wait until each part runs or is queued at a replica. Raises the error of a part."""
        for part in self._parts:
            part.accepted.wait()
            if part.error is not None:
                raise part.error

    def __iter__(self) -> Iterator[tuple[int, SampledTokens]]:
        return self

    def __next__(self) -> tuple[int, SampledTokens]:
        while self._incomplete_parts:
            match self._results.get():
                case None:
                    self._incomplete_parts -= 1
                case Exception() as error:
                    self._incomplete_parts = 0
                    self.close()
                    raise error
                case sampled:
                    return sampled
        self.close()
        raise StopIteration

    def fail(self, error: DistillError) -> None:
        """Cancel the unfinished parts of the order. The iteration then raises `error`.

        This method returns without waiting for the parts.
        """
        for part in self._parts:
            part.cancel(error)

    def close(self) -> None:
        """Cancel unfinished parts, and join their threads. May be called twice, and in any thread.

        If the iteration continues after this call, it raises Unavailable.
        """
        for part in self._parts:
            part.cancel()
        for part in self._parts:
            part.join()
        self._on_close(self)


def _info_of(message: rollouts_pb2.RolloutInfo) -> RolloutServiceInfo:
    return RolloutServiceInfo(
        message.engine,
        message.vocab_size,
        message.max_length or None,
        message.dtype,
        message.lora_rank,
        message.sleeps,
    )

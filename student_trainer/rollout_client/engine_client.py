"""`EngineClient`: orders sequences from rollout services, and survives their restarts."""

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
from clients.runs.placed_services import PlacedAddress
from protos import rollouts_pb2
from protos.errors import DistillError, InvalidInput, TimedOut, Unavailable, WrongState
from student_trainer.rollout_client.engine_replica import (
    CONNECT_SECONDS,
    PartRequest,
    Pushed,
    Replica,
    no_answer,
)
from student_trainer.rollout_client.order import Order
from student_trainer.rollouts.sampler import SampledTokens

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutServiceInfo:
    """What all services of a client have in common.

    max_length: of a sequence; None: no limit. lora_rank: of the adapters that snapshots have in
    place of all weights; 0: all weights. sleeps: `EngineClient.sleep` may be called.
    """

    engine: str
    vocab_size: int
    max_length: int | None
    dtype: str
    lora_rank: int
    sleeps: bool


class EngineClient:
    """Orders sequences from one or several rollout services (replicas); thread-safe.

    The sequences of an order are divided into contiguous parts, one for each replica, in a way that
    depends only on their number, the number of addresses and `rank`. If a replica is lost, its part
    is sampled again as a whole, by another replica or by the same one when it is back: the hf
    engine then makes the same bits. A sequence is delivered once.

    An order fails with Unavailable, field `rollouts.address`, if no replica has accepted one of its
    parts for `patience_seconds`, without time in which a replica had accepted it: an accepted part
    may take any time, as long as the connection lives. Replicas that answer Overloaded are asked
    again without end.

    pushed: the newest pushed version; an order whose pushed weights are lost goes on with it.
    """

    def __init__(
        self,
        addresses: Sequence[str | PlacedAddress],
        *,
        rank: int = 0,
        patience_seconds: float = 60.0,
    ) -> None:
        """Open the channels, which connect on first use.

        `rank`: of this process among the trainer's. The first part of an order goes to the replica
        `rank` modulo the number of replicas. Raises InvalidInput if there is no address, or if one
        cannot be used.
        """
        if not addresses:
            raise InvalidInput("is empty", field=FIELD, hint="give HOST:PORT of a rollout service")
        self._replicas = [Replica(address) for address in addresses]
        self._rank = rank
        self._patience_seconds = patience_seconds
        self._vocab_size: int | None = None
        self.pushed = Pushed()
        self._lock = threading.Lock()
        self._closed: DistillError | None = None  # why no order is sent any more
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
        """Return what the replicas have in common; log those that do not answer in 5 s.

        `vocab_size`: of the student. Raises WrongState if two replicas differ, or have another
        vocabulary than the student or another protocol than this program, Unavailable if none
        answers, InvalidInput if a server is not a rollout service, Unauthenticated or Forbidden if
        a token is refused.
        """
        found: dict[Replica, RolloutServiceInfo] = {}
        # All at the same time, so that two that are away take 5 s and not 10.
        asked: list[tuple[Replica, Any]] = []
        for replica in self._replicas:
            try:
                asked.append((replica, replica.ask()))
            except Unavailable as error:
                fault: DistillError = error
                log.warning("%s", fault)
        for replica, call in asked:
            try:
                message = call.result()
                replica.proven = True
                check_protocol(replica.address, message.protocol)
                found[replica] = _info_of(message)
            except grpc.RpcError as error:
                fault = replica.fault_of(error)
                if not isinstance(fault, Unavailable | TimedOut):
                    raise fault from error
                log.warning("%s", fault)
        if not found:
            raise no_answer(self._replicas, fault, CONNECT_SECONDS)
        (first, info), *others = found.items()
        for other, its in others:
            if its != info:
                raise WrongState(
                    f"the {first.name} has {info}, the {other.name} has {its}",
                    field=FIELD,
                    hint="start all rollout services with the same model and options",
                )
        if vocab_size not in (None, info.vocab_size):
            raise WrongState(
                f"the model of the {first.name} has {info.vocab_size} token ids, the student has"
                f" {vocab_size}",
                field=FIELD,
                hint="start it with --model set to the student.model of the job",
            )
        self._vocab_size = info.vocab_size
        return info

    def sample(self, order: Order) -> Sampling:
        """Send an order; return its sequences as an iterator, which fills in the background.

        Blocks until each part runs or waits at a replica. Raises the error of a part that fails
        before; the iterator raises later ones.
        """
        sampling = self.start(order)
        try:
            sampling.wait_until_accepted()
        except BaseException:
            sampling.close()
            raise
        return sampling

    def start(self, order: Order) -> Sampling:
        """Like `sample`, without blocking: the iterator raises all errors of the order."""
        sampling = Sampling(self._forget)
        try:
            with self._lock:
                if self._closed is not None:
                    raise self._closed
                self._unfinished.add(sampling)
                self._start(sampling, order)
        except BaseException:
            sampling.close()
            raise
        return sampling

    def sleep(self) -> None:
        """Free the memory of the services' GPUs until the next order; wait until it is free.

        A service that has an order, of another client, does not sleep. One that is away is logged:
        it starts asleep. Raises WrongState if a service does not sleep at all.
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
        """Whether no order is sent any more, after `close` or `fail`."""
        return self._closed is not None

    def fail(self, error: DistillError) -> None:
        """Fail all orders, and all later ones, with an error."""
        with self._lock:
            self._closed = self._closed or error
            unfinished = tuple(self._unfinished)
        for sampling in unfinished:
            sampling.fail(error)

    def close(self) -> None:
        """Cancel all orders, join their threads and close the channels. Safe to call twice."""
        closed = Unavailable("the client of the rollout service is closed")
        with self._lock:
            self._closed = self._closed or closed
            unfinished = tuple(self._unfinished)
        for sampling in unfinished:
            sampling.close()
        for replica in self._replicas:
            replica.close()

    @property
    def replicas(self) -> Sequence[Replica]:
        """The services, in the order of their addresses."""
        return self._replicas

    def _start(self, sampling: Sampling, order: Order) -> None:
        count, total = len(self._replicas), len(order.sequences)
        for number in range(count):
            first, end = total * number // count, total * (number + 1) // count
            if first < end:
                home = (self._rank + number) % count
                sampling.start(
                    replace(order, sequences=order.sequences[first:end]),
                    first,
                    ring=[*self._replicas[home:], *self._replicas[:home]],
                    patience_seconds=self._patience_seconds,
                    vocab_size=self._vocab_size,
                    pushed=self.pushed,
                )

    def _forget(self, sampling: Sampling) -> None:
        with self._lock:
            self._unfinished.discard(sampling)


class Sampling:
    """The sequences of one order: (index in the order, its tokens), in the order of their end.

    Iterate once, in one thread. An error ends the iteration; `close` cancels the rest of the order
    at the replicas.
    """

    def __init__(self, on_close: Callable[[Sampling], None]) -> None:
        self._on_close = on_close
        self._parts: list[PartRequest] = []
        self._left = 0  # parts that are not complete
        # Sequences, an error, or None for a part that is complete.
        self._found: queue.SimpleQueue[tuple[int, SampledTokens] | Exception | None]
        self._found = queue.SimpleQueue()

    def start(
        self,
        part: Order,
        first: int,
        *,
        ring: Sequence[Replica],
        patience_seconds: float,
        vocab_size: int | None,
        pushed: Pushed,
    ) -> None:
        """Send a part of the order, its sequences from `first` on, as `PartRequest` does."""
        self._left += 1
        request = PartRequest(
            part,
            ring,
            patience_seconds=patience_seconds,
            vocab_size=vocab_size,
            pushed=pushed,
            deliver=lambda index, sampled: self._found.put((first + index, sampled)),
            done=self._found.put,
        )
        self._parts.append(request)

    def wait_until_accepted(self) -> None:
        """Wait until each part runs or waits at a replica. Raises the error of a part."""
        for part in self._parts:
            part.accepted.wait()
            if part.error is not None:
                raise part.error

    def __iter__(self) -> Iterator[tuple[int, SampledTokens]]:
        return self

    def __next__(self) -> tuple[int, SampledTokens]:
        while self._left:
            match self._found.get():
                case None:
                    self._left -= 1
                case Exception() as error:
                    self._left = 0
                    self.close()
                    raise error
                case found:
                    return found
        self.close()
        raise StopIteration

    def fail(self, error: DistillError) -> None:
        """Cancel what is unfinished; the iteration raises `error`. Does not wait."""
        for part in self._parts:
            part.cancel(error)

    def close(self) -> None:
        """Cancel what is unfinished, and join the threads; safe to call twice, and in any thread.

        An iteration that goes on gets Unavailable.
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

"""The gRPC servicer of the rollout service: reads orders, samples them, and sends the sequences."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, TypeVar

from protos import rollouts_pb2, rollouts_pb2_grpc
from protos.errors import Overloaded, TimedOut, WrongState
from protos.program.logs import fields
from protos.rpc.failpoints import failpoint
from protos.rpc.transport import ROLLOUTS_PROTOCOL, STREAM_OPEN
from student_trainer.rollout_client.order import Order, WeightsVersion
from student_trainer.rollout_client.wire import (
    OrderLimits,
    OrderReader,
    sampled_parts,
    version_message,
)
from student_trainer.rollout_service.engines.base import RolloutEngine
from student_trainer.rollout_service.metrics import RolloutMetrics
from student_trainer.rollout_service.schedule import Schedule, ScheduleEntry
from student_trainer.rollouts.sampler import SampledTokens

# Number of jobs to remember; the job whose last order is the oldest is forgotten first.
_MAX_JOBS = 10_000


class Fence:
    """Refuses the orders of an earlier attempt of a job after a later attempt has sent an order.

    The newest attempt of each job is stored in memory only, so it is lost when the service
    restarts.
    """

    def __init__(self, max_jobs: int = _MAX_JOBS) -> None:
        self._max_jobs = max_jobs
        self._newest: OrderedDict[str, int] = OrderedDict()

    def admit(self, weights: WeightsVersion) -> WrongState | None:
        """Check the attempt of an order, and record it.

        Raises WrongState if a later attempt of the job has sent an order. If the attempt is new,
        returns the error with which the orders of earlier attempts must end; otherwise None.
        """
        if not weights.job:
            return None
        newest = self._newest.get(weights.job, 0)
        if weights.attempt < newest:
            raise _replaced_error(newest)
        self._newest[weights.job] = weights.attempt
        self._newest.move_to_end(weights.job)
        if len(self._newest) > self._max_jobs:
            self._newest.popitem(last=False)
        return _replaced_error(weights.attempt) if weights.attempt > newest else None


def _replaced_error(newest: int) -> WrongState:
    return WrongState(
        f"attempt {newest} of this job has replaced the attempt that sent this order",
        field="rollouts.address",
        hint="this trainer ends; read the log of the newer attempt",
    )


log = logging.getLogger(__name__)

# Time limit between two parts of an order: an incomplete order holds memory.
SECONDS_BETWEEN_PARTS = 60.0
# Limit of the message bytes of all orders that arrive, wait or are sampled.
MAX_HELD_BYTES = 1 << 30
# Time limit for a client to read a sequence: a slow client delays orders of other versions.
SECONDS_TO_READ = 300.0

# Queues of sequences, then an error or None, hold one result: the engine waits for slow clients.
_Parts = AsyncIterator[rollouts_pb2.OrderPart]
_Message = TypeVar("_Message")
_ResultQueue = asyncio.Queue[tuple[int, SampledTokens] | Exception | None]


class RolloutServicer(rollouts_pb2_grpc.RolloutsServicer):
    """The gRPC service distill.v1.Rollouts. The server's error interceptor converts its errors."""

    def __init__(self, engine: RolloutEngine, metrics: RolloutMetrics | None = None) -> None:
        self._metrics = metrics = metrics or RolloutMetrics()
        info = engine.info
        self._engine = engine
        self._limits = OrderLimits(info.vocab_size, info.max_length, info.in_flight)
        self._schedule = schedule = Schedule(self._load_version)
        self._fence = Fence()
        self._held_bytes = 0
        metrics.gauge("running_orders", "Orders that are sampled.", lambda: schedule.running_count)
        metrics.gauge("waiting_orders", "Orders that wait.", lambda: schedule.waiting_count)
        metrics.gauge("held_bytes", "Bytes of all orders.", lambda: self._held_bytes)
        version = "Version of the loaded weights, finished steps; -1 without verified weights."
        metrics.gauge(
            "weights_version",
            version,
            lambda: schedule.loaded_version.number if schedule.loaded_version else -1,
        )

    async def GetRolloutInfo(
        self, request: rollouts_pb2.GetRolloutInfoRequest, context: object
    ) -> rollouts_pb2.RolloutInfo:
        """Return the engine, its model, the loaded weights, and the numbers of orders."""
        info, schedule = self._engine.info, self._schedule
        return rollouts_pb2.RolloutInfo(
            engine=info.name,
            model=info.model,
            vocab_size=info.vocab_size,
            max_length=info.max_length or 0,
            dtype=info.dtype,
            device=info.device,
            loaded=version_message(schedule.loaded_version) if schedule.loaded_version else None,
            running_orders=schedule.running_count,
            waiting_orders=schedule.waiting_count,
            sampled_tokens=self._metrics.sampled_tokens,
            weight_loads=schedule.loads,
            lora_rank=info.lora_rank,
            protocol=ROLLOUTS_PROTOCOL,
            sleeps=info.sleeps,
        )

    async def Sleep(
        self, request: rollouts_pb2.SleepRequest, context: object
    ) -> rollouts_pb2.SleepReply:
        """Free the GPU memory until the next order. If an order runs or waits, do nothing.

        Raises WrongState if the service was started without --sleep.
        """
        if not self._engine.info.sleeps:
            raise WrongState(
                "this rollout service does not sleep", hint="start the service with --sleep"
            )
        await self._schedule.sleep(self._engine.sleep)
        return rollouts_pb2.SleepReply()

    async def Sample(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[rollouts_pb2.SampledPart]:
        """Sample the sequences of one order; see protos/rollouts.proto.

        Raises the errors of the engine, and:

        - InvalidInput: the order is invalid.
        - WrongState: a later attempt of the order's job has sent an order, before this order or
          while it waits or runs.
        - Overloaded: too many orders wait, or the orders take too much memory.
        - Unavailable: the service is stopping.
        """
        order_bytes = _OrderBytes(self)
        try:
            order = await self._read_order(aiter(request_iterator), order_bytes)
            self._admit(order.weights)
            entry = self._schedule.enter(order.weights)
            results: _ResultQueue = asyncio.Queue(1)
            entry.sampling = sampling = asyncio.create_task(
                self._sample_order(order, entry, results)
            )
            sampling.add_done_callback(lambda _: self._schedule.leave(entry))
            # gRPC does not close this generator when the client goes away.
            context.add_done_callback(lambda _: sampling.cancel())
            await context.send_initial_metadata((STREAM_OPEN,))
            while (result := await results.get()) is not None:
                if isinstance(result, Exception):
                    raise result
                for part in sampled_parts(*result):
                    yield part
                    failpoint("sampled-part-sent")
        finally:
            order_bytes.release()

    async def _load_version(self, weights: WeightsVersion) -> None:
        start_time = time.perf_counter()
        log_fields = {"lineage": weights.lineage, "number": weights.number}
        try:
            with self._metrics.load():
                await self._engine.load(weights)
        except Exception as error:
            log.warning("weights refused", extra=fields(**log_fields, error=str(error)))
            raise
        seconds = round(time.perf_counter() - start_time, 3)
        log.info("weights", extra=fields(**log_fields, seconds=seconds))

    def _admit(self, weights: WeightsVersion) -> None:
        replaced_error = self._fence.admit(weights)
        if replaced_error is not None:
            self._schedule.end_earlier_attempts(weights, replaced_error)

    def drain(self) -> None:
        """Let the waiting orders fail with Unavailable. Running orders continue."""
        self._schedule.drain()

    async def _read_order(self, parts: _Parts, order_bytes: _OrderBytes) -> Order:
        reader = OrderReader(self._limits)
        while True:
            try:
                part = await _next_message(parts, "order")
            except StopAsyncIteration:
                return reader.order()
            order_bytes.add(part.ByteSize())
            reader.add(part)

    async def _sample_order(
        self, order: Order, entry: ScheduleEntry, results: _ResultQueue
    ) -> None:
        """Put the sequences of an order into the queue.

        At the end, put None, or the error that ended the order.
        """
        error: Exception | None = None
        start_time = time.perf_counter()
        try:
            with self._metrics.order():
                await self._sample_to_end(order, entry, results)
        except Exception as raised:  # noqa: BLE001 (the order is answered with it)
            error = raised
        self._schedule.leave(entry)  # already now: the client may read the last sequences slowly
        log_fields = {"sequences": len(order.sequences), "number": order.weights.number}
        seconds = round(time.perf_counter() - start_time, 3)
        outcome = "OK" if error is None else type(error).__name__
        log.debug("order", extra=fields(code=outcome, **log_fields, seconds=seconds))
        await results.put(error)

    async def _sample_to_end(
        self, order: Order, entry: ScheduleEntry, results: _ResultQueue
    ) -> None:
        try:
            await entry.wait_until_started()
            failpoint("order-started")
            async with aclosing(self._engine.sample(order)) as sequences:
                async for index, sampled in sequences:
                    self._metrics.sequence(len(sampled.token_ids))
                    await _deliver(results, (index, sampled))
        except asyncio.CancelledError:
            if entry.error is None:
                raise  # the client has disconnected
            raise entry.error from None


async def _next_message(parts: AsyncIterator[_Message], stream_name: str) -> _Message:
    """Return the next message of a stream.

    Raises TimedOut if no message arrives in time, and StopAsyncIteration after the last message.
    """
    try:
        async with asyncio.timeout(SECONDS_BETWEEN_PARTS):
            return await anext(parts)
    except TimeoutError as error:
        raise TimedOut(
            f"no part of the {stream_name} arrived for {SECONDS_BETWEEN_PARTS:g} s"
        ) from error


async def _deliver(results: _ResultQueue, result: tuple[int, SampledTokens]) -> None:
    """Put a sequence into the queue. Raises TimedOut if the client does not read it in time."""
    try:
        async with asyncio.timeout(SECONDS_TO_READ):
            await results.put(result)
    except TimeoutError as error:
        raise TimedOut(f"the client has read no sequence for {SECONDS_TO_READ:g} s") from error


class _OrderBytes:
    """Counts the bytes of one order, and adds them to the total of the service."""

    def __init__(self, service: RolloutServicer) -> None:
        self._service = service
        self._bytes = 0

    def add(self, size: int) -> None:
        """Add `size` bytes. Raises Overloaded if the orders take too much memory."""
        if self._service._held_bytes + size > MAX_HELD_BYTES:
            raise Overloaded(
                f"the orders of this rollout service exceed {MAX_HELD_BYTES >> 20} MiB of memory",
                hint="retry in a second, or divide the order",
            )
        self._bytes += size
        self._service._held_bytes += size

    def release(self) -> None:
        self._service._held_bytes -= self._bytes
        self._bytes = 0

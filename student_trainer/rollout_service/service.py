"""The gRPC servicer of the rollout service: reads orders, samples them, and sends the sequences."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, TypeVar

from clients.preflight.rollouts import PROTOCOL
from protos import rollouts_pb2, rollouts_pb2_grpc
from protos.errors import Overloaded, TimedOut, WrongState
from protos.rpc.failpoints import failpoint
from protos.rpc.logs import fields
from protos.rpc.transport import STREAM_OPEN
from student_trainer.rollout_client.order import LACKS_PUSHED, Order, WeightsVersion
from student_trainer.rollout_client.push.wire import read_offer, read_start
from student_trainer.rollout_client.wire import (
    OrderLimits,
    OrderReader,
    sampled_parts,
    version_message,
)
from student_trainer.rollout_service.engines.base import RolloutEngine
from student_trainer.rollout_service.fence import Fence
from student_trainer.rollout_service.metrics import RolloutMetrics
from student_trainer.rollout_service.push import IncomingPush
from student_trainer.rollout_service.schedule import Place, Schedule, Withdrawn
from student_trainer.rollouts.sampler import SampledTokens

log = logging.getLogger(__name__)

# An order that arrives holds memory, so one that stalls is ended.
SECONDS_BETWEEN_PARTS = 60.0
# Of all orders that arrive, wait or are sampled, as messages.
MAX_HELD_BYTES = 1 << 30
# A client that does not read keeps orders of other versions waiting.
SECONDS_TO_READ = 300.0

# Sequences, then an error or None. It holds one: the engine waits for a client that reads slowly.
_Parts = AsyncIterator[rollouts_pb2.OrderPart]
_Part = TypeVar("_Part")
_Results = asyncio.Queue[tuple[int, SampledTokens] | Exception | None]


class RolloutServicer(rollouts_pb2_grpc.RolloutsServicer):
    """The service distill.v1.Rollouts. Errors propagate to the error interceptor of the server."""

    def __init__(self, engine: RolloutEngine, metrics: RolloutMetrics | None = None) -> None:
        self._metrics = metrics = metrics or RolloutMetrics()
        info = engine.info
        self._engine = engine
        self._limits = OrderLimits(info.vocab_size, info.max_length, info.in_flight)
        self._schedule = schedule = Schedule(self._load)
        self._fence = Fence()
        self._pushes: dict[WeightsVersion, IncomingPush] = {}
        self._process = secrets.token_hex(8)
        self._held_bytes = 0
        metrics.gauge("running_orders", "Orders that are sampled.", lambda: schedule.running)
        metrics.gauge("waiting_orders", "Orders that wait.", lambda: schedule.waiting)
        metrics.gauge("held_bytes", "Bytes of all orders.", lambda: self._held_bytes)
        version = "Version of the loaded weights, finished steps; -1 without verified weights."
        metrics.gauge(
            "weights_version", version, lambda: schedule.loaded.number if schedule.loaded else -1
        )

    async def GetRolloutInfo(
        self, request: rollouts_pb2.GetRolloutInfoRequest, context: object
    ) -> rollouts_pb2.RolloutInfo:
        """Return the engine, its model, the loaded weights and the load."""
        info, schedule = self._engine.info, self._schedule
        return rollouts_pb2.RolloutInfo(
            engine=info.name,
            model=info.model,
            vocab_size=info.vocab_size,
            max_length=info.max_length or 0,
            dtype=info.dtype,
            device=info.device,
            loaded=version_message(schedule.loaded) if schedule.loaded else None,
            running_orders=schedule.running,
            waiting_orders=schedule.waiting,
            sampled_tokens=self._metrics.sampled_tokens,
            weight_loads=schedule.loads,
            lora_rank=info.lora_rank,
            protocol=PROTOCOL,
            sleeps=info.sleeps,
        )

    async def Sleep(
        self, request: rollouts_pb2.SleepRequest, context: object
    ) -> rollouts_pb2.SleepReply:
        """Free the memory of the GPU until the next order, unless an order runs or waits.

        Raises WrongState if the service was started without --sleep.
        """
        if not self._engine.info.sleeps:
            raise WrongState("this rollout service does not sleep", hint="start it with --sleep")
        await self._schedule.rest(self._engine.sleep)
        return rollouts_pb2.SleepReply()

    async def Push(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[rollouts_pb2.PushReply]:
        """Load weights that come through a process group; see protos/rollouts.proto.

        Raises InvalidInput if the offer is wrong, WrongState if a later attempt of the job has sent
        an order, and the error of the engine.
        """
        parts = aiter(request_iterator)
        push = IncomingPush(read_offer(await _next(parts, "push"), self._limits))
        weights = push.offer.version
        self._hear(weights)
        context.add_done_callback(lambda _: push.withdraw())
        self._pushes[weights] = push
        place = self._schedule.enter(weights)
        loaded = asyncio.ensure_future(place.started())
        wanted = asyncio.ensure_future(push.wanted.wait())
        try:
            await asyncio.wait((loaded, wanted), return_when=asyncio.FIRST_COMPLETED)
            if not loaded.done():
                info = self._engine.info
                ready = rollouts_pb2.PushReady(
                    process=self._process, ranks=info.ranks, device=info.device.partition(":")[0]
                )
                yield rollouts_pb2.PushReply(ready=ready)
                push.start(read_start(await anext(parts)))
            await loaded
            yield rollouts_pb2.PushReply(loaded=rollouts_pb2.PushLoaded())
        finally:
            push.withdraw()
            self._pushes.pop(weights, None)
            self._schedule.leave(place)
            loaded.cancel()
            wanted.cancel()

    async def Sample(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[rollouts_pb2.SampledPart]:
        """Sample the sequences of one order; see protos/rollouts.proto.

        Raises InvalidInput if the order is wrong, WrongState if a later attempt of its job has sent
        an order, now or while this one waits or is sampled, Overloaded if too many orders wait or
        if they take too much memory, Unavailable if the service stops, and the error of the engine.
        """
        held = _HeldBytes(self)
        try:
            order = await self._read(aiter(request_iterator), held)
            self._hear(order.weights)
            if order.weights.pushed and not self._schedule.has(order.weights):
                raise _lacks(order.weights)
            place = self._schedule.enter(order.weights)
            results: _Results = asyncio.Queue(1)
            place.sampling = sampling = asyncio.create_task(self._sample(order, place, results))
            sampling.add_done_callback(lambda _: self._schedule.leave(place))
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
            held.release()

    async def _load(self, weights: WeightsVersion) -> None:
        began = time.perf_counter()
        facts = {"lineage": weights.lineage, "number": weights.number}
        try:
            with self._metrics.load():
                push = self._pushes.get(weights)
                if push is None:
                    if weights.pushed:
                        raise _lacks(weights)
                    await self._engine.load(weights)
                else:
                    seat = await push.seat()
                    failpoint("push-started")
                    await self._engine.receive(push.offer, seat)
        except Exception as error:
            log.warning("weights refused", extra=fields(**facts, error=str(error)))
            raise
        seconds = round(time.perf_counter() - began, 3)
        log.info("weights", extra=fields(**facts, seconds=seconds))

    def _hear(self, weights: WeightsVersion) -> None:
        replaced = self._fence.hear(weights)
        if replaced is not None:
            self._schedule.end_earlier(weights, replaced)

    def drain(self) -> None:
        """Fail the orders that wait with Unavailable; those that run go on."""
        self._schedule.drain()

    async def _read(self, parts: _Parts, held: _HeldBytes) -> Order:
        reader = OrderReader(self._limits)
        while True:
            try:
                part = await _next(parts, "order")
            except StopAsyncIteration:
                return reader.order()
            held.take(part.ByteSize())
            reader.add(part)

    async def _sample(self, order: Order, place: Place, results: _Results) -> None:
        """Put the sequences of an order into the queue, then None, or the error that ended it."""
        error: Exception | None = None
        began = time.perf_counter()
        try:
            with self._metrics.order():
                await self._sample_to_end(order, place, results)
        except Exception as caught:
            error = caught
        self._schedule.leave(place)  # now: the client may read the last sequences slowly
        facts = {"sequences": len(order.sequences), "number": order.weights.number}
        seconds = round(time.perf_counter() - began, 3)
        outcome = "OK" if error is None else type(error).__name__
        log.debug("order", extra=fields(code=outcome, **facts, seconds=seconds))
        await results.put(error)

    async def _sample_to_end(self, order: Order, place: Place, results: _Results) -> None:
        try:
            await place.started()
            failpoint("order-started")
            async with aclosing(self._engine.sample(order)) as sequences:
                async for index, sampled in sequences:
                    self._metrics.sequence(len(sampled.token_ids))
                    await _hand_over(results, (index, sampled))
        except asyncio.CancelledError:
            if place.error is None:
                raise  # the client is gone
            raise place.error from None


def _lacks(weights: WeightsVersion) -> Withdrawn:
    return Withdrawn(
        f"the pushed version {weights.number} is not loaded here",
        field=LACKS_PUSHED,
        hint="the trainer sends a newer one, or writes files",
    )


async def _next(parts: AsyncIterator[_Part], what: str) -> _Part:
    """Return the next message. Raises TimedOut, and StopAsyncIteration after the last one."""
    try:
        async with asyncio.timeout(SECONDS_BETWEEN_PARTS):
            return await anext(parts)
    except TimeoutError as error:
        raise TimedOut(f"no part of the {what} arrived for {SECONDS_BETWEEN_PARTS:g} s") from error


async def _hand_over(results: _Results, result: tuple[int, SampledTokens]) -> None:
    """Put a sequence into the queue. Raises TimedOut if the client does not read."""
    try:
        async with asyncio.timeout(SECONDS_TO_READ):
            await results.put(result)
    except TimeoutError as error:
        raise TimedOut(f"the client has read no sequence for {SECONDS_TO_READ:g} s") from error


class _HeldBytes:
    """The bytes of one order, counted in those of the service."""

    def __init__(self, service: RolloutServicer) -> None:
        self._service = service
        self._bytes = 0

    def take(self, size: int) -> None:
        """Count `size` bytes more. Raises Overloaded if the orders take too much memory."""
        if self._service._held_bytes + size > MAX_HELD_BYTES:
            raise Overloaded(
                f"the orders of this rollout service take {MAX_HELD_BYTES >> 20} MiB",
                hint="retry in a second, or divide the order",
            )
        self._bytes += size
        self._service._held_bytes += size

    def release(self) -> None:
        self._service._held_bytes -= self._bytes
        self._bytes = 0

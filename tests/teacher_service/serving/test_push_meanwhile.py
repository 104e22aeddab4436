"""Weights pushed while something else happens: other pushes, requests, a device that fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from clients.teacher.push_weights import weights_parts
from protos import teacher_pb2
from protos.errors import Overloaded, TimedOut, WrongState
from teacher_service.cache.row_cache import RowCache
from teacher_service.engines.base import WeightUpdate
from teacher_service.engines.hf import HfEngine
from teacher_service.serving import weights as weights_module
from teacher_service.serving.batcher import Batcher
from teacher_service.serving.scorer import RowScorer
from teacher_service.serving.weights import WeightUpdater
from tests.teacher_service.serving.pushing import NAME, QUERY, arrays, parameters, push, rows


def test_one_push_at_a_time_and_a_silent_one_ends(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "SECONDS_BETWEEN_PARTS", 0.2)
    engine, stalled = HfEngine(str(tiny_model)), asyncio.Event()

    async def silent() -> AsyncIterator[teacher_pb2.WeightsPart]:
        yield next(weights_parts(arrays(engine), tau=None, base_version=0))
        stalled.set()
        await asyncio.sleep(60)

    async def main() -> None:
        async with Batcher(engine, max_batch_tokens=1000) as batcher:
            weights = WeightUpdater(engine, batcher)
            first = asyncio.create_task(weights.push(silent()))
            await stalled.wait()
            with pytest.raises(Overloaded):
                await weights.push(silent())
            with pytest.raises(TimedOut):
                await first
            with pytest.raises(TimedOut):
                await weights.push(silent())

    asyncio.run(main())
    assert engine.info.version == 0


def test_a_push_that_is_given_up_while_it_is_applied_counts(
    tiny_model: Path, other_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client tries again after the version that it knows: nothing may be averaged twice."""
    engine = HfEngine(str(tiny_model))
    pushed, update = arrays(HfEngine(str(other_model))), engine.update
    is_applying, may_continue = threading.Event(), threading.Event()

    def slow(new: WeightUpdate) -> None:
        is_applying.set()
        assert may_continue.wait(20)
        update(new)

    monkeypatch.setattr(engine, "update", slow)

    async def send() -> AsyncIterator[teacher_pb2.WeightsPart]:
        parts = [*weights_parts(pushed, tau=0.5, base_version=0)]
        for part in parts:
            if part is parts[-1] and is_applying.is_set():
                asyncio.get_running_loop().call_later(0.05, may_continue.set)
            yield part

    async def main() -> None:
        async with Batcher(engine, max_batch_tokens=1000) as batcher:
            weights = WeightUpdater(engine, batcher)
            first = asyncio.create_task(weights.push(send()))
            assert await asyncio.to_thread(is_applying.wait, 20)
            first.cancel()
            await asyncio.wait([first])
            with pytest.raises(WrongState, match="follows version 0, the teacher has 1"):
                await weights.push(send())

    asyncio.run(main())
    assert engine.info.version == 1


def test_half_an_update_is_never_served(
    tiny_model: Path, other_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that fails between two tensors: nothing is scored until a full replacement."""
    engine, other_engine = HfEngine(str(tiny_model)), HfEngine(str(other_model))
    broken = parameters(engine)[NAME]

    def fail(*_: Any) -> None:
        raise MemoryError("planted")

    broken.copy_ = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        push(engine, weights_parts(arrays(other_engine), tau=None, base_version=0))
    assert engine.info.version == 0
    with pytest.raises(WrongState, match="failed partway"):
        engine.score([QUERY])
    del broken.copy_
    with pytest.raises(WrongState, match="failed partway"):
        push(engine, weights_parts(arrays(other_engine), tau=0.9, base_version=0))
    push(engine, weights_parts(arrays(other_engine), tau=None, base_version=0))
    assert rows(engine).head_logprobs.tobytes() == rows(other_engine).head_logprobs.tobytes()


def test_rows_are_of_the_version_that_they_say(tiny_model: Path, other_model: Path) -> None:
    """Four pushes among requests that never cease: each answer is whole, and of one version."""
    engine = HfEngine(str(tiny_model), batch_invariant=True)
    version_arrays = [arrays(engine), arrays(HfEngine(str(other_model)))]
    expected = [rows(HfEngine(str(path))) for path in (tiny_model, other_model)]
    cache = RowCache(memory_bytes=1 << 20, disk=None)

    async def send(version: int) -> AsyncIterator[teacher_pb2.WeightsPart]:
        for part in weights_parts(
            version_arrays[(version + 1) % 2], tau=None, base_version=version
        ):
            yield part
            await asyncio.sleep(0)

    async def main() -> list[int]:
        async with Batcher(engine, max_batch_tokens=300) as batcher:
            scorers = [RowScorer(batcher, cache), RowScorer(batcher, None)]
            weights, versions = WeightUpdater(engine, batcher), []

            enough = asyncio.Event()

            async def ask(number: int) -> None:
                while not enough.is_set():
                    answer = await scorers[number % 2].score(QUERY)
                    versions.append(answer.version)
                    rows, block = answer.rows.block, expected[answer.version % 2]
                    assert rows.head_logprobs.tobytes() == block.head_logprobs.tobytes()
                    await asyncio.sleep(0)  # an answer of the cache waits for nothing

            asking = asyncio.gather(*(ask(number) for number in range(16)))

            async def until_seen(version: int) -> None:
                while versions.count(version) < 100 and not asking.done():
                    await asyncio.sleep(0.001)

            for version in range(4):
                await until_seen(version)
                assert (await weights.push(send(version))).version == version + 1
            await until_seen(4)
            enough.set()
            await asking
            return versions

    assert {*asyncio.run(main())} == {0, 1, 2, 3, 4}

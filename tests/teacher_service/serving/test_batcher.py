"""The batcher with a scripted engine: budget, isolation of faults, cancellation, bounds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from clients.teacher.query import ScoreQuery
from protos.errors import Corrupt, DistillError, Overloaded
from protos.rows.codec import RowBlock
from teacher_service.engines.fake import FakeEngine, FakeSettings
from teacher_service.serving import batcher as module
from teacher_service.serving.batcher import Batcher
from teacher_service.serving.fair_queue import EngineAnswer, Sender


class ScriptedEngine(FakeEngine):
    """Records its batches; waits for `gate` before each; crashes on token 9, refuses token 8."""

    def __init__(self) -> None:
        super().__init__(FakeSettings(vocab=16, crash_token=9, nan_token=8))
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def score(self, queries: Sequence[ScoreQuery]) -> list[RowBlock | DistillError]:
        self.gate.wait(20)
        self.batches.append([len(query.token_ids) for query in queries])
        return super().score(queries)


def query(*ids: int) -> ScoreQuery:
    return ScoreQuery(np.array(ids, np.int32), 1, top_k=2)


def test_one_bad_query_fails_alone() -> None:
    async def main() -> list[EngineAnswer | BaseException]:
        async with Batcher(ScriptedEngine(), max_batch_tokens=1000) as batcher:
            queries = [query(1, 2, 3), query(1, 9, 3), query(4, 5), query(8, 1, 2)]
            return await asyncio.gather(*map(batcher.score, queries), return_exceptions=True)

    fine, crashed, also_fine, refused = asyncio.run(main())
    assert isinstance(fine, EngineAnswer)
    assert isinstance(also_fine, EngineAnswer)
    assert isinstance(crashed, RuntimeError)
    assert isinstance(refused, Corrupt)


def test_chance_gets_a_second_try() -> None:
    class Unlucky(ScriptedEngine):
        def score(self, queries: Sequence[ScoreQuery]) -> list[RowBlock | DistillError]:
            self.batches.append([len(query.token_ids) for query in queries])
            if len(self.batches) == 1:
                raise MemoryError("once")
            return super().score(queries)

    engine = Unlucky()

    async def main() -> EngineAnswer:
        async with Batcher(engine, max_batch_tokens=1000) as batcher:
            return await batcher.score(query(1, 2, 3))

    assert len(asyncio.run(main()).block) == 2


def test_a_batch_keeps_to_its_padded_tokens() -> None:
    engine = ScriptedEngine()

    async def main() -> None:
        async with Batcher(engine, max_batch_tokens=20) as batcher:
            lengths = [5, 5, 30, 5, 5, 4, 7]
            await asyncio.gather(*(batcher.score(query(*[1] * n)) for n in lengths))

    asyncio.run(main())
    assert engine.batches == [[5, 5, 5, 5], [30], [4, 7]]
    # A sequence above the budget goes alone; all others stay below it.


def test_a_burst_forms_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that end with a step of generation arrive one after the other."""
    monkeypatch.setattr(module, "GAP_SECONDS", 0)  # a turn of the event loop
    monkeypatch.setattr(module, "LINGER_SECONDS", 60)
    engine = ScriptedEngine()

    async def main() -> None:
        async with Batcher(engine, max_batch_tokens=1000) as batcher:
            burst = []
            for _ in range(20):
                burst.append(asyncio.create_task(batcher.score(query(1, 2))))
                await asyncio.sleep(0)
            await asyncio.gather(*burst)

    asyncio.run(main())
    assert engine.batches == [[2] * 20]


def test_an_idle_engine_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_SECONDS", 0)
    engine = ScriptedEngine()

    async def main() -> None:
        async with Batcher(engine, max_batch_tokens=1000) as batcher:
            burst = []
            while not engine.batches:  # queries arrive in every turn of the event loop
                burst.append(asyncio.create_task(batcher.score(query(1, 2))))
                await asyncio.sleep(0)
            await asyncio.gather(*burst)

    asyncio.run(main())


def test_cancelled_queries_are_never_computed() -> None:
    engine = ScriptedEngine()

    async def main() -> None:
        async with Batcher(engine, max_batch_tokens=4) as batcher:
            engine.gate.clear()
            first = asyncio.create_task(batcher.score(query(1, 1, 1)))
            await asyncio.sleep(0.05)
            waiting = [asyncio.create_task(batcher.score(query(2, 2))) for _ in range(5)]
            second_answer = asyncio.create_task(batcher.score(query(1, 1, 1, 1)))
            await asyncio.sleep(0.05)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            engine.gate.set()
            await asyncio.gather(first, second_answer)

    asyncio.run(main())
    assert engine.batches == [[3], [4]]


def test_the_queue_is_read_by_another_thread() -> None:
    """As the one that serves /metrics does, while queries come and go."""
    engine = ScriptedEngine()
    engine.gate.clear()
    faults: list[Exception] = []
    finished = threading.Event()

    async def main() -> None:
        async with Batcher(engine, max_batch_tokens=4) as batcher:

            def read() -> None:
                try:
                    while not finished.is_set():
                        assert batcher.queued_tokens % 2 == 0
                except Exception as error:
                    faults.append(error)

            reader = threading.Thread(target=read)
            reader.start()
            waiting = [asyncio.create_task(batcher.score(query(1, 2))) for _ in range(3000)]
            await asyncio.sleep(0.2)
            for task in waiting:
                task.cancel()
            finished.set()
            await asyncio.to_thread(reader.join)
            engine.gate.set()
            await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(main())
    assert faults == []


def test_a_full_queue_says_so_and_recovers() -> None:
    engine = ScriptedEngine()

    async def main() -> None:
        async with Batcher(engine, max_batch_tokens=100, max_queued_bytes=3500) as batcher:
            engine.gate.clear()
            accepted = [asyncio.create_task(batcher.score(query(1, 2))) for _ in range(3)]
            await asyncio.sleep(0.05)
            with pytest.raises(Overloaded):
                await batcher.score(query(1, 2))
            engine.gate.set()
            await asyncio.gather(*accepted)
            await batcher.score(query(1, 2))

    asyncio.run(main())


def test_senders_take_turns_and_captures_come_last() -> None:
    """A light client beside one that is 128 deep waits for the batch that runs, not for all."""
    engine = ScriptedEngine()

    async def main() -> list[int]:
        async with Batcher(engine, max_batch_tokens=8) as batcher:
            engine.gate.clear()
            heavy, capture, light = Sender(), Sender(is_background=True), Sender()
            answers = [
                asyncio.create_task(batcher.score(query(2, 2, 2), capture)) for _ in range(4)
            ]
            answers += [
                asyncio.create_task(batcher.score(query(1, 1, 1, 1), heavy)) for _ in range(128)
            ]
            await asyncio.sleep(0.05)  # a batch is in the engine
            late = asyncio.create_task(batcher.score(query(3, 3), light))
            await asyncio.sleep(0.05)
            engine.gate.set()
            await late
            before = len(engine.batches)
            await asyncio.gather(*answers)
            return [before, sum(lengths.count(3) for lengths in engine.batches[-3:])]

    before, captures = asyncio.run(main())
    assert before <= 3
    assert captures == 4, "they come in the last batches"

"""Equal queries that meet: one forward for all, whoever of them gives up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from clients.teacher.query import ScoreQuery
from protos.errors import Corrupt, DistillError
from protos.rows.codec import RowBlock
from teacher_service.cache.row_cache import EncodedRows, RowCache
from teacher_service.engines.fake import FakeEngine, FakeSettings
from teacher_service.serving.batcher import Batcher
from teacher_service.serving.scorer import RowScorer


class GatedEngine(FakeEngine):
    """Counts the sequences it scores, each batch only once `gate` is set."""

    def __init__(self) -> None:
        super().__init__(FakeSettings(vocab=16, nan_token=8))
        self.forwards = 0
        self.gate = threading.Event()

    def score(self, queries: Sequence[ScoreQuery]) -> list[RowBlock | DistillError]:
        self.forwards += len(queries)
        self.gate.wait(20)
        return super().score(queries)


def query(*ids: int) -> ScoreQuery:
    return ScoreQuery(np.array(ids, np.int32), 1, top_k=2)


def life(engine: GatedEngine, cached: bool, work: Callable[[RowScorer], Awaitable[None]]) -> None:
    async def main() -> None:
        cache = RowCache(memory_bytes=1 << 20, disk=None) if cached else None
        async with Batcher(engine, max_batch_tokens=100) as batcher:
            try:
                await work(RowScorer(batcher, cache))
            finally:
                engine.gate.set()

    asyncio.run(main())


@pytest.mark.parametrize("cached", [True, False])
def test_equal_queries_make_one_forward(cached: bool) -> None:
    engine = GatedEngine()

    async def work(scorer: RowScorer) -> None:
        tasks = [asyncio.create_task(scorer.score(query(1, 2, 3))) for _ in range(20)]
        other_answer = asyncio.create_task(scorer.score(query(1, 2, 4)))
        await asyncio.sleep(0.05)
        engine.gate.set()
        first, *more = await asyncio.gather(*tasks)
        assert all(scored is first for scored in more)
        assert (await other_answer).rows.encoded != first.rows.encoded
        assert engine.forwards == 2
        await scorer.score(query(1, 2, 3))
        assert engine.forwards == (2 if cached else 3)

    life(engine, cached, work)


def test_the_others_go_on_when_one_gives_up() -> None:
    engine = GatedEngine()

    async def work(scorer: RowScorer) -> None:
        tasks = [asyncio.create_task(scorer.score(query(1, 2, 3))) for _ in range(3)]
        await asyncio.sleep(0.05)
        for task in tasks[:2]:
            task.cancel()
        await asyncio.sleep(0)
        engine.gate.set()
        assert len((await tasks[2]).rows.block) == 2
        assert tasks[0].cancelled()
        assert engine.forwards == 1

    life(engine, True, work)


def test_when_all_give_up_the_next_one_starts_anew() -> None:
    engine = GatedEngine()

    async def work(scorer: RowScorer) -> None:
        blocker = asyncio.create_task(scorer.score(query(5, 5)))
        await asyncio.sleep(0.05)
        tasks = [asyncio.create_task(scorer.score(query(1, 2, 3))) for _ in range(3)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        again = asyncio.create_task(scorer.score(query(1, 2, 3)))
        await asyncio.sleep(0)
        engine.gate.set()
        await asyncio.gather(blocker, again)
        assert engine.forwards == 2, "the abandoned query is never computed"

    life(engine, True, work)


def test_a_fault_reaches_all_and_is_not_kept() -> None:
    engine = GatedEngine()

    async def work(scorer: RowScorer) -> None:
        tasks = [asyncio.create_task(scorer.score(query(1, 8, 3))) for _ in range(3)]
        await asyncio.sleep(0.05)
        engine.gate.set()
        faults = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(fault) for fault in faults] == [Corrupt] * 3
        assert engine.forwards == 1
        with pytest.raises(Corrupt):
            await scorer.score(query(1, 8, 3))
        assert engine.forwards == 2

    life(engine, True, work)


class TurningCache(RowCache):
    """Finds what it has, and then the weights change, `turns` times."""

    def __init__(self, engine: FakeEngine, turns: int) -> None:
        super().__init__(memory_bytes=1 << 20)
        self._engine = engine
        self._turns = turns

    async def get(self, key: bytes, query: ScoreQuery) -> EncodedRows | None:
        rows = await super().get(key, query)
        if self._turns:
            self._turns -= 1
            after = FakeEngine(FakeSettings(vocab=16, seed=self._turns + 1)).info
            version = self._engine.info.version + 1
            self._engine.info = replace(after, version=version)
        return rows


def test_rows_of_weights_that_change_meanwhile_are_not_given_out() -> None:
    engine = FakeEngine(FakeSettings(vocab=16))

    async def main() -> None:
        cache = TurningCache(engine, turns=0)
        async with Batcher(engine, max_batch_tokens=100) as batcher:
            scorer = RowScorer(batcher, cache)
            old = await scorer.score(query(1, 2, 3))
            assert (await scorer.score(query(1, 2, 3))).version == old.version == 0
            cache._turns = 3
            new = await scorer.score(query(1, 2, 3))
            assert new.version == engine.info.version == 3
            assert cache.counters()["hits"] == 2, "the old rows were found, and not given out"
            # What was scored is kept under the weights that made it.
            assert (await scorer.score(query(1, 2, 3))).rows.encoded == new.rows.encoded
            assert cache.counters()["hits"] == 3

    asyncio.run(main())

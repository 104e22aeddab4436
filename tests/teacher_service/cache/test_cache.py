"""The cache: identical bytes without a forward pass, nothing corrupt served, nothing lost by a
restart.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.store.store import LogitStore, StoredRows
from clients.teacher.query import ScoreQuery, row_key
from protos.errors import DistillError, WrongState
from protos.rows.codec import RowBlock
from teacher_service.cache.disk_tier import DiskTier
from teacher_service.cache.row_cache import EncodedRows, RowCache
from teacher_service.cache.settings import CacheSettings, make_cache
from teacher_service.engines.fake import FakeEngine, FakeSettings
from teacher_service.serving.batcher import Batcher
from teacher_service.serving.scorer import RowScorer


class CountingEngine(FakeEngine):
    def __init__(self) -> None:
        super().__init__(FakeSettings(vocab=64))
        self.forwards = 0

    def score(self, queries: Sequence[ScoreQuery]) -> list[RowBlock | DistillError]:
        self.forwards += len(queries)
        return super().score(queries)


QUERIES = [
    ScoreQuery(np.arange(i, i + 9, dtype=np.int32), 2, top_k=4, temperature=1.0) for i in range(5)
]
FINGERPRINT = CountingEngine().info.fingerprint


def score_all(engine: CountingEngine, cache: RowCache | None) -> list[bytes]:
    """One life of a teacher that is asked every query; closes the cache."""

    async def main() -> list[bytes]:
        async with cache or nullcontext(), Batcher(engine, max_batch_tokens=100) as batcher:
            scorer = RowScorer(batcher, cache)
            return [(await scorer.score(query)).rows.encoded for query in QUERIES * 2]

    return asyncio.run(main())


def disk(root: Path, max_bytes: int = 1 << 30) -> DiskTier:
    return DiskTier(root, fingerprint=FINGERPRINT, max_bytes=max_bytes)


def store_of(root: Path) -> Path:
    return root / FINGERPRINT[:32]


def test_a_hit_is_the_same_bytes_without_a_forward() -> None:
    engine = CountingEngine()
    cache = RowCache(memory_bytes=1 << 20, disk=None)
    scored = score_all(engine, cache)
    assert engine.forwards == len(QUERIES)
    assert scored[: len(QUERIES)] == scored[len(QUERIES) :]
    assert scored == score_all(CountingEngine(), None)
    counters = cache.counters()
    assert (counters["hits"], counters["misses"]) == (len(QUERIES), len(QUERIES))
    assert counters["memory_hits"] == len(QUERIES)


def test_memory_is_bounded() -> None:
    engine = CountingEngine()
    rows = len(score_all(CountingEngine(), None)[0])
    score_all(engine, RowCache(memory_bytes=3 * (rows + 256), disk=None))
    # Five queries in turn through room for three: every one is gone before it is asked again.
    assert engine.forwards == 2 * len(QUERIES)
    score_all(engine, RowCache(memory_bytes=0, disk=None))
    assert engine.forwards == 4 * len(QUERIES)


def test_a_restart_keeps_the_disk(tmp_path: Path) -> None:
    first, second = CountingEngine(), CountingEngine()
    scored = score_all(first, RowCache(memory_bytes=1 << 20, disk=disk(tmp_path)))
    assert scored == score_all(second, RowCache(memory_bytes=1 << 20, disk=disk(tmp_path)))
    assert (first.forwards, second.forwards) == (len(QUERIES), 0)


def test_the_disk_answers_what_memory_forgot(tmp_path: Path) -> None:
    score_all(CountingEngine(), RowCache(memory_bytes=0, disk=disk(tmp_path)))
    engine = CountingEngine()
    score_all(engine, RowCache(memory_bytes=0, disk=disk(tmp_path)))
    assert engine.forwards == 0


def test_corrupt_rows_on_disk_are_scored_again_and_replaced(tmp_path: Path) -> None:
    scored = score_all(CountingEngine(), RowCache(memory_bytes=1 << 20, disk=disk(tmp_path)))
    shard = next(store_of(tmp_path).glob("*.arrow"))
    data = bytearray(shard.read_bytes())
    # A bit of the rows of the third query.
    data[data.index(scored[2]) + 60] ^= 1
    shard.write_bytes(data)

    engine = CountingEngine()
    cache = RowCache(memory_bytes=1 << 20, disk=disk(tmp_path))
    assert score_all(engine, cache) == scored
    assert (engine.forwards, cache.counters()["disk_corrupt"]) == (1, 1)

    engine = CountingEngine()
    cache = RowCache(memory_bytes=1 << 20, disk=disk(tmp_path))
    assert score_all(engine, cache) == scored
    assert (engine.forwards, cache.counters()["disk_corrupt"]) == (0, 0)


def test_a_lost_manifest_begins_a_new_store(tmp_path: Path) -> None:
    scored = score_all(CountingEngine(), RowCache(memory_bytes=0, disk=disk(tmp_path)))
    manifest = store_of(tmp_path) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    for forwards in (len(QUERIES), 0):
        engine = CountingEngine()
        assert score_all(engine, RowCache(memory_bytes=1 << 20, disk=disk(tmp_path))) == scored
        assert engine.forwards == forwards


def test_rows_of_another_shape_are_not_served(tmp_path: Path) -> None:
    """Valid codec bytes under the wrong key."""
    scored = score_all(CountingEngine(), None)
    short = QUERIES[0]
    longer = ScoreQuery(np.arange(12, dtype=np.int32), 2, top_k=4)
    with LogitStore(store_of(tmp_path), write=True, metadata={"fingerprint": FINGERPRINT}) as store:
        key = row_key(FINGERPRINT, 0, longer)
        store.append([StoredRows(key, short.token_ids.tobytes(), 2, scored[0])])
    cache = RowCache(memory_bytes=1 << 20, disk=disk(tmp_path))

    async def main() -> EncodedRows | None:
        async with cache:
            return await cache.get(key, longer)

    assert asyncio.run(main()) is None
    assert cache.counters()["disk_corrupt"] == 1


def test_the_first_write_wins() -> None:
    cache = RowCache(memory_bytes=1 << 20, disk=None)

    async def main() -> tuple[Any, Any]:
        async with Batcher(FakeEngine(FakeSettings(vocab=64)), max_batch_tokens=99) as batcher:
            first = (await RowScorer(batcher, None).score(QUERIES[0])).rows
        async with Batcher(
            FakeEngine(FakeSettings(vocab=64, seed=1)), max_batch_tokens=99
        ) as batcher:
            second = (await RowScorer(batcher, None).score(QUERIES[0])).rows
            return first, second

    first, second = asyncio.run(main())
    key = row_key("a", 0, QUERIES[0])
    assert cache.put(key, QUERIES[0], first).encoded == first.encoded
    assert cache.put(key, QUERIES[0], second).encoded == first.encoded != second.encoded


def wait_for(key: bytes, tier: DiskTier) -> None:
    deadline = time.monotonic() + 10
    while key not in tier and time.monotonic() < deadline:
        time.sleep(0.01)
    assert key in tier


@pytest.mark.parametrize("limit", ["bytes", "shards"])
def test_the_disk_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr("teacher_service.cache.disk_tier.FLUSH_BYTES", 1)
    if limit == "shards":
        monkeypatch.setattr("teacher_service.cache.disk_tier.MAX_SHARDS", 3)
    tier = disk(tmp_path, max_bytes=350_000 if limit == "bytes" else 1 << 30)
    keys = [bytes([number]) * 32 for number in range(8)]
    for key in keys:
        tier.put(StoredRows(key, b"", 1, key * (100_000 // 32)))
        wait_for(key, tier)
    asyncio.run(tier.close())
    assert [key in tier for key in keys] == [False] * 5 + [True] * 3
    assert sum(file.stat().st_size for file in store_of(tmp_path).glob("*.arrow")) < 350_000
    # A smaller bound holds from the next flush on, at the latest at the end.
    asyncio.run(disk(tmp_path, max_bytes=150_000).close())
    assert len(list(store_of(tmp_path).glob("*.arrow"))) == 1
    with LogitStore(store_of(tmp_path)) as store:
        assert store.get(keys[-1]) == keys[-1] * (100_000 // 32)


def test_few_rows_wait_for_the_end(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    for number in range(5):
        tier.put(StoredRows(bytes([number]) * 32, b"", 1, b"rows"))
        time.sleep(0.02)
    assert list(store_of(tmp_path).glob("*.arrow")) == []
    asyncio.run(tier.close())
    assert len(list(store_of(tmp_path).glob("*.arrow"))) == 1
    assert len(LogitStore(store_of(tmp_path))) == 5


def test_a_second_teacher_on_the_same_rows_is_told(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    with pytest.raises(WrongState):
        disk(tmp_path)
    asyncio.run(tier.close())


def test_a_full_disk_turns_the_tier_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_space(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", no_space)
    engine = CountingEngine()
    cache = RowCache(memory_bytes=1 << 20, disk=disk(tmp_path))
    score_all(engine, cache)
    monkeypatch.undo()
    assert engine.forwards == len(QUERIES)
    assert "No space left" in caplog.text
    assert list(store_of(tmp_path).glob("*.arrow*")) == []


def test_rows_given_twice_do_not_fill_the_queue_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that forgets hands the same key over again before the first is on disk."""
    monkeypatch.setattr("teacher_service.cache.disk_tier.MAX_WAITING_BYTES", 1000)
    monkeypatch.setattr("teacher_service.cache.disk_tier.FLUSH_SECONDS", 0.05)
    tier = disk(tmp_path)
    for number, size in enumerate((300, 300, 900)):
        key = bytes([number]) * 32
        for _ in range(3):
            tier.put(StoredRows(key, b"", 1, bytes(size)))
        wait_for(key, tier)
    asyncio.run(tier.close())


def test_other_users_cannot_read_the_rows(tmp_path: Path) -> None:
    directory, umask = tmp_path / "rows", os.umask(0o002)
    try:
        make_cache(CacheSettings(directory, 0, 1 << 20, False, None, 0), None, FINGERPRINT)
    finally:
        os.umask(umask)
    assert directory.stat().st_mode & 0o777 == 0o700

"""Rows shared through a real Redis: what is kept, for how long, for whom, and how it is asked."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from clients.store.store import StoredRows
from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery, row_key
from protos.errors import InvalidInput
from protos.rows.codec import RowBlock, encode_rows, max_encoded_bytes
from teacher_service.cache.redis_address import RedisAddress
from teacher_service.cache.redis_tier import MAX_VALUE_BYTES, Breaker, RedisTier, name_of, seal
from teacher_service.cache.row_cache import EncodedRows, RowCache
from teacher_service.cache.settings import CacheSettings, open_redis
from teacher_service.engines.fake import FakeEngine, FakeSettings
from teacher_service.serving.batcher import Batcher
from teacher_service.serving.scorer import RowScorer
from tests.faults.proxy import FaultProxy, Toxics
from tests.teacher_service.cache.redis_server import RedisServer, patient
from tests.teacher_service.conftest import StartTeacher

__all__ = ["patient"]

pytestmark = pytest.mark.usefixtures("patient")

K = 4
T = TypeVar("T")


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    shared_server.do("FLUSHALL")
    return shared_server


def entry(number: int, n: int = 20) -> StoredRows:
    rng = np.random.default_rng(number)
    block = RowBlock(
        rng.integers(0, 99, (n, K)).astype(np.int32),
        -np.sort(rng.random((n, K)).astype(np.float32)),
        -rng.random(n).astype(np.float32),
        -rng.random(n).astype(np.float32),
    )
    return StoredRows(number.to_bytes(32, "big"), b"", 1, encode_rows(block))


def with_tier(
    url: str, work: Callable[[RedisTier], Awaitable[T]], *, zstd: bool = False, ttl: int = 60
) -> T:
    async def main() -> T:
        tier = RedisTier(RedisAddress(url), ttl_seconds=ttl, zstd=zstd)
        try:
            return await work(tier)
        finally:
            await tier.close()

    return asyncio.run(main())


@pytest.mark.parametrize("zstd", [False, True])
def test_two_teachers_share_rows(server: RedisServer, zstd: bool) -> None:
    engine = FakeEngine(FakeSettings(vocab=64))
    queries = [ScoreQuery(np.arange(i, i + 30, dtype=np.int32), 2, top_k=K) for i in range(5)]

    async def life() -> tuple[list[bytes], dict[str, int]]:
        redis = RedisTier(RedisAddress(server.url), ttl_seconds=60, zstd=zstd)
        cache = RowCache(memory_bytes=1 << 20, redis=redis)
        async with cache, Batcher(engine, max_batch_tokens=999) as batcher:
            scorer = RowScorer(batcher, cache)
            answers = [await scorer.score(query) for query in queries]
        return [answer.rows.encoded for answer in answers], dict(cache.counters())

    first, counters = asyncio.run(life())
    assert (counters["hits"], counters["misses"]) == (0, 5)
    second, counters = asyncio.run(life())
    assert second == first
    assert (counters["redis_hits"], counters["redis_misses"], counters["misses"]) == (5, 0, 0)
    ttls = [server.do("TTL", name) for name in server.do("KEYS", "distill:*")]
    assert len(ttls) == 5
    assert all(50 < ttl <= 60 for ttl in ttls)


@pytest.mark.parametrize("zstd", [False, True])
def test_what_was_put_comes_back_and_the_first_stays(server: RedisServer, zstd: bool) -> None:
    first = entry(1)
    second = StoredRows(first.key, b"", 1, entry(2).rows)

    async def work(tier: RedisTier) -> None:
        for entry_to_put in (first, second):
            tier.put(entry_to_put)
        await tier.wait_until_written()
        assert await tier.get(first.key, max_encoded_bytes(20, K)) == first.rows
        assert await tier.get(b"?" * 32, 10_000) is None
        tier.drop(first.key)
        await tier.wait_until_written()
        assert await tier.get(first.key, max_encoded_bytes(20, K)) is None

    with_tier(server.url, work, zstd=zstd)


def test_eight_teachers_that_score_the_same(server: RedisServer) -> None:
    """C7 of Redis: one value a key, and all read the same one."""

    async def work(first: RedisTier) -> None:
        tiers = [RedisTier(RedisAddress(server.url), ttl_seconds=60) for _ in range(7)]
        keys = [bytes([number]) * 32 for number in range(20)]
        for number, tier in enumerate([first, *tiers]):
            for key in keys:
                tier.put(StoredRows(key, b"", 1, entry(number).rows))
        for tier in [first, *tiers]:
            await tier.wait_until_written()
        for key in keys:
            stored_rows = {
                await tier.get(key, max_encoded_bytes(20, K)) for tier in [first, *tiers]
            }
            assert len(stored_rows) == 1
            assert stored_rows <= {entry(number).rows for number in range(8)}
        for tier in tiers:
            await tier.close()

    with_tier(server.url, work)


def test_lookups_of_one_moment_travel_together(server: RedisServer) -> None:
    entries = [entry(number) for number in range(32)]
    for stored_entry in entries:
        server.do("SET", name_of(stored_entry.key), seal(stored_entry.key, stored_entry.rows))

    async def work(tier: RedisTier) -> float:
        await tier.get(b"?" * 32, 1000)  # connects
        loop = asyncio.get_running_loop()
        start = loop.time()
        answers = await asyncio.gather(
            *(tier.get(e.key, max_encoded_bytes(20, K)) for e in entries)
        )
        assert answers == [stored_entry.rows for stored_entry in entries]
        return loop.time() - start

    with FaultProxy(server.address, Toxics(latency_seconds=0.02)) as proxy:
        seconds = with_tier(f"redis://{proxy.address}/0", work)
    # One by one they would take at least 32 * 40 ms, at any load.
    assert seconds < 32 * 0.04


def test_a_value_that_is_far_too_long_is_neither_read_nor_kept(server: RedisServer) -> None:
    key = entry(1).key
    server.do("SET", name_of(key), seal(key, entry(1).rows))
    server.do("SETRANGE", name_of(key), (256 << 20) - 1, b"x")

    async def work(cache_tier: RedisTier) -> None:
        cache = RowCache(memory_bytes=1 << 20, redis=cache_tier)
        query = ScoreQuery(np.arange(21, dtype=np.int32), 1, top_k=K)
        assert await cache.get(key, query) is None
        await cache_tier.wait_until_written()
        assert cache.counters()["redis_corrupt"] == 1
        assert cache.counters()["redis_errors"] == 0
        # What would be that long is not written.
        cache_tier.put(StoredRows(b"!" * 32, b"", 1, bytes(MAX_VALUE_BYTES)))
        await cache_tier.wait_until_written()

    with_tier(server.url, work)
    assert server.do("DBSIZE") == 0


def test_what_is_kept_is_found_whatever_its_widest_form(server: RedisServer) -> None:
    """33,000 rows with k = 64 are 9 MB as they are written, and 17 MB with the widest ids."""
    rng = np.random.default_rng(0)
    rows, k = 33_000, 64
    query = ScoreQuery(rng.integers(0, 90, rows + 1).astype(np.int32), 1, top_k=k)
    floats = np.zeros(rows, np.float32)
    heads = np.tile(np.arange(k, dtype=np.int32), (rows, 1))
    block = RowBlock(heads, np.zeros((rows, k), np.float16), floats, floats)
    scored = EncodedRows(encode_rows(block), block)
    assert max_encoded_bytes(rows, k) > MAX_VALUE_BYTES > len(scored.encoded)

    async def work(tier: RedisTier) -> None:
        RowCache(memory_bytes=0, redis=tier).put(b"k" * 32, query, scored)
        await tier.wait_until_written()
        # 9 MB may take longer than a lookup may take on a busy machine.
        async with asyncio.timeout(30):
            while await RowCache(memory_bytes=0, redis=tier).get(b"k" * 32, query) is None:
                assert server.do("DBSIZE") == 1

    with_tier(server.url, work)


def test_lookups_given_up_never_mix_up_answers(server: RedisServer) -> None:
    entries = [entry(number) for number in range(50)]
    for stored_entry in entries:
        server.do("SET", name_of(stored_entry.key), seal(stored_entry.key, stored_entry.rows))

    async def work(tier: RedisTier) -> None:
        rng = np.random.default_rng(0)
        for _ in range(200):
            tasks = [
                asyncio.create_task(tier.get(entries[i].key, max_encoded_bytes(20, K)))
                for i in rng.integers(0, 50, 5)
            ]
            await asyncio.sleep(0)
            for task in tasks[:3]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for stored_entry in entries:
            assert await tier.get(stored_entry.key, max_encoded_bytes(20, K)) == stored_entry.rows
        assert tier.counts.errors == 0

    with_tier(server.url, work)


def test_the_breaker_lets_one_attempt_through(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    breaker = Breaker(5.0)
    assert breaker.allows()
    breaker.trip()
    allowed = []
    for tenth in range(151):
        now = 100.0 + tenth / 10
        if breaker.allows():
            allowed.append(now)
    assert allowed == [105.0, 110.0, 115.0]
    breaker.close()
    assert breaker.allows()
    assert breaker.allows()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://localhost", "not a Redis URL"),
        ("redis://", "not a Redis URL"),
        ("redis://localhost:99999", "not a Redis URL"),
        ("redis://localhost/0?socket_timeout=60", "cannot set socket_timeout"),
        ("rediss://localhost?ssl_ca_certs=/missing.pem", "there is no file /missing.pem"),
    ],
)
def test_an_address_that_cannot_be_right(url: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        RedisAddress(url)
    assert caught.value.field == "--redis-url"
    assert caught.value.hint


def settings(url: str | None) -> CacheSettings:
    return CacheSettings(Path("unused"), 0, 0, False, url, 60)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://[localhost", "not a Redis URL"),
        ("redis://127.0.0.1:1?ssl_check_hostname=no", "ssl_check_hostname"),
        ("rediss://127.0.0.1:1?ssl_speed=9", "ssl_speed"),
        ("rediss://127.0.0.1:1?ssl_cert_reqs=perhaps", "perhaps"),
    ],
)
def test_an_address_that_cannot_work_is_refused_at_the_start(url: str, message: str) -> None:
    """Not taken for a server that is away, which is waited for."""
    with pytest.raises(InvalidInput, match=message) as caught:
        open_redis(settings(url))
    assert caught.value.field == "--redis-url"


def test_passwords_and_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer(tmp_path, "--requirepass", "secret") as server:
        with server.client(password="secret") as admin:
            rights = ["~distill:*", "+getrange", "+set", "+del", "on"]
            admin.execute_command("ACL", "SETUSER", "teacher", ">hunter2", *rights)
            admin.execute_command("ACL", "SETUSER", "reader", ">hunter2", *rights[:2], "on")
        url = f"redis://teacher@{server.address}/0"
        wrong = {
            server.url: None,  # no password where one is needed
            url: "hunter3",
            url.replace("teacher", "nobody"): "hunter2",
            url.replace("teacher", "reader"): "hunter2",  # may not write
        }
        for address, password in wrong.items():
            with monkeypatch.context() as patch:
                if password:
                    patch.setenv("DISTILL_REDIS_PASSWORD", password)
                with pytest.raises(InvalidInput, match="denies access") as caught:
                    open_redis(settings(address))
                assert "hunter" not in str(caught.value)
        with pytest.raises(InvalidInput, match="command line"):
            open_redis(settings(url.replace("@", ":hunter2@")))

        monkeypatch.setenv("DISTILL_REDIS_URL", url)
        monkeypatch.setenv("DISTILL_REDIS_PASSWORD", "hunter2")

        async def work() -> None:
            tier = open_redis(settings(None))
            assert tier
            tier.put(entry(1))
            await tier.wait_until_written()
            assert await tier.get(entry(1).key, max_encoded_bytes(20, K)) == entry(1).rows
            tier.drop(entry(1).key)
            await tier.close()
            assert tier.counts.errors == 0

        asyncio.run(work())


def test_tls(server: RedisServer, tmp_path: Path) -> None:
    """With the right authority rows come back; with none the server is not spoken to."""
    subprocess.run(
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 9 -subj /CN=x"
        f" -addext subjectAltName=IP:127.0.0.1 -keyout {tmp_path}/key -out {tmp_path}/pem",
        shell=True,
        check=True,
        capture_output=True,
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "pem", tmp_path / "key")

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(forward(reader, inner[1]), forward(inner[0], writer))

    async def work(tier: RedisTier) -> tuple[bytes | None, int]:
        tier.put(entry(1))
        await tier.wait_until_written()
        return await tier.get(entry(1).key, max_encoded_bytes(20, K)), tier.counts.errors

    async def main() -> None:
        front = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        url = f"rediss://127.0.0.1:{front.sockets[0].getsockname()[1]}/0"
        trusted = f"{url}?ssl_ca_certs={tmp_path}/pem"
        async with front:
            assert await asyncio.to_thread(with_tier, trusted, work) == (entry(1).rows, 0)
            assert await asyncio.to_thread(with_tier, url, work) == (None, 1)

    asyncio.run(main())


def test_two_teacher_programs_share_rows(
    start_teacher: StartTeacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = ScoreQuery(np.arange(9, dtype=np.int32), 1, top_k=2)
    with RedisServer(tmp_path, "--requirepass", "secret") as server:
        args = [*("--engine", "fake", "--model", "vocab=64"), "--redis-url", server.url]
        command = [sys.executable, "-m", "teacher_service", *args]
        monkeypatch.setenv("DISTILL_REDIS_PASSWORD", "wrong")
        process = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert process.returncode == 2
        assert process.stderr.startswith("error: --redis-url: ")
        assert process.stderr.count("\n") == 1
        assert "wrong" not in process.stderr.replace("WRONGPASS", "")
        monkeypatch.setenv("DISTILL_REDIS_PASSWORD", "secret")
        rows = []
        for hits in (0, 1):
            teacher = start_teacher(*args, "--cache-dir", str(tmp_path / f"rows-{hits}"))
            with TeacherClient(teacher.address) as client:
                rows.append(client.submit(query).result(60))
                if hits:
                    server.kill()
                    again = ScoreQuery(query.token_ids[::-1].copy(), 1, top_k=2)
                    client.submit(again).result(60)
            assert teacher.stop() == 0
            assert f" redis_hits={hits} " in teacher.log.read_text()
            assert "secret" not in teacher.log.read_text()
        np.testing.assert_array_equal(rows[0].head_ids, rows[1].head_ids)


def test_keys_of_every_weight_version_differ() -> None:
    query = ScoreQuery(np.arange(9, dtype=np.int32), 2, top_k=4)
    assert len({row_key(f, v, query) for f in "ab" for v in range(5)}) == 10

"""With any fault of Redis the rows are the same, and waits for Redis are short and rare."""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import redis

from clients.teacher.query import ScoreQuery, row_key
from protos.rows.codec import decode_rows, encode_rows
from teacher_service.cache.redis_address import RedisAddress
from teacher_service.cache.redis_tier import RedisTier, name_of, seal
from teacher_service.cache.row_cache import RowCache
from teacher_service.engines.fake import FakeEngine, FakeSettings
from teacher_service.serving.batcher import Batcher
from teacher_service.serving.scorer import RowScorer
from tests.faults.conftest import REPEATS
from tests.faults.proxy import FaultProxy, Toxics
from tests.teacher_service.cache.redis_server import RedisServer, patient

__all__ = ["patient"]

ENGINE = FakeEngine(FakeSettings(vocab=64))
QUERIES = [ScoreQuery(np.arange(i, i + 40, dtype=np.int32), 2, top_k=4) for i in range(24)]
FAULT_AT = 12
MAX_ADDED_SECONDS = 0.25
ATTEMPTS = 3  # a busy machine may spoil a timing


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


@dataclass(frozen=True)
class Life:
    """The answers of one teacher, the time of each, and the counters of its cache."""

    rows: list[bytes]
    seconds: list[float]
    counters: dict[str, int]

    @property
    def added_seconds(self) -> float:
        """The slowest answer's time minus the median."""
        return max(self.seconds) - statistics.median(self.seconds)


def life(
    address: str | None, fault: Callable[[], object] = lambda: None, at: int = FAULT_AT
) -> Life:
    """Ask a new teacher all queries in turn; inject the fault before query number `at`."""

    async def main() -> Life:
        tier = RedisTier(RedisAddress(f"redis://{address}/0"), ttl_seconds=60) if address else None
        rows, seconds = [], []
        cache = RowCache(memory_bytes=0, redis=tier)
        async with cache, Batcher(ENGINE, max_batch_tokens=999) as batcher:
            scorer = RowScorer(batcher, cache)
            for number, query in enumerate(QUERIES):
                if number == at:
                    await asyncio.to_thread(fault)
                start_time = time.perf_counter()
                rows.append((await scorer.score(query)).rows.encoded)
                seconds.append(time.perf_counter() - start_time)
        return Life(rows, seconds, dict(cache.counters()))

    return asyncio.run(main())


@pytest.fixture(scope="module")
def undisturbed() -> Life:
    return life(None)


def revive(server: RedisServer, proxy: FaultProxy) -> None:
    """Undo all faults and fill the cache with rows."""
    proxy.toxics = Toxics()
    if server.process.poll() is not None:
        server.start()
    server.send(signal.SIGCONT)
    server.do("CONFIG", "SET", "maxmemory", "0")
    for _ in range(ATTEMPTS):  # on a busy machine a healthy Redis may be late, too
        server.do("FLUSHALL")
        life(server.address)
        if server.do("DBSIZE") == len(QUERIES):
            break
    assert server.do("DBSIZE") == len(QUERIES)


def set_toxics(toxics: Toxics) -> Callable[[RedisServer, FaultProxy], None]:
    def fault(server: RedisServer, proxy: FaultProxy) -> None:
        proxy.toxics = toxics

    return fault


def fill(server: RedisServer) -> None:
    server.do("FLUSHALL")
    server.do("CONFIG", "SET", "maxmemory", "1")


def evict(server: RedisServer) -> None:
    server.do("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    server.do("CONFIG", "SET", "maxmemory", server.do("INFO", "memory")["used_memory"])


def new_password(server: RedisServer) -> None:
    server.do("CONFIG", "SET", "requirepass", "changed")
    with server.client(password="changed") as admin, suppress(redis.ConnectionError):
        admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


FAULTS: dict[str, Callable[[RedisServer, FaultProxy], object]] = {
    "killed": lambda server, _: server.kill(),
    "frozen": lambda server, _: server.send(signal.SIGSTOP),
    "500 ms late": set_toxics(Toxics(latency_seconds=0.5)),
    "blackhole": set_toxics(Toxics(blackhole=True)),
    "reset in a reply": set_toxics(Toxics(reset_after_bytes=500, slice_bytes=100)),
    "emptied": lambda server, _: server.do("FLUSHALL"),
    "full": lambda server, _: fill(server),
    "evicting": lambda server, _: evict(server),
    "new password": lambda server, _: new_password(server),
}


@pytest.mark.parametrize("name", FAULTS)
def test_redis_fails_in_the_middle(server: RedisServer, undisturbed: Life, name: str) -> None:
    """C1. The same rows; one answer waits, at most 250 ms, and then Redis is not used."""
    with FaultProxy(server.address) as proxy:
        for _ in range(ATTEMPTS):
            revive(server, proxy)
            faulty_life = life(proxy.address, lambda: FAULTS[name](server, proxy))
            server.send(signal.SIGCONT)
            assert faulty_life.rows == undisturbed.rows
            assert faulty_life.counters["redis_corrupt"] == 0
            if not (problems := find_problems(name, faulty_life)):
                break
    print(f"redis {name}: the slowest answer took {1e3 * faulty_life.added_seconds:.0f} ms more")
    assert problems == []


def find_problems(name: str, faulty_life: Life) -> list[str]:
    hits, misses, errors = (
        faulty_life.counters[f"redis_{n}"] for n in ("hits", "misses", "errors")
    )
    # The breaker stays open until the last query: the lookup and its round trip may each
    # count the one fault.
    allowed = (0,) if name in ("emptied", "evicting") else (1, 2)
    queries_after = len(QUERIES) - FAULT_AT
    added_seconds = faulty_life.added_seconds
    problems = {
        f"an answer took {added_seconds:.2f} s more": added_seconds > MAX_ADDED_SECONDS,
        f"{hits} hits before the fault": hits < FAULT_AT,
        f"{errors} errors": errors not in allowed,
        f"{misses} misses": misses > queries_after
        or (name != "evicting" and misses < queries_after),
    }
    return [problem for problem, applies in problems.items() if applies]


def test_redis_is_killed_at_any_moment(server: RedisServer, undisturbed: Life) -> None:
    """C1, killed: while rows are read and while they are written."""
    random_ = random.Random(0)
    added_seconds = []
    for repeat in range(REPEATS):
        if server.process.poll() is not None:
            server.start()
        if repeat % 2:
            life(server.address)
        at = random_.randrange(1, len(QUERIES))
        faulty_life = life(server.address, server.kill, at)
        assert faulty_life.rows == undisturbed.rows
        assert faulty_life.counters["redis_hits"] == (at if repeat % 2 else 0)
        assert faulty_life.counters["redis_corrupt"] == 0
        added_seconds.append(faulty_life.added_seconds)
    assert statistics.median(added_seconds) < MAX_ADDED_SECONDS
    print(
        f"redis killed {REPEATS} times:"
        f" the slowest answer took {1e3 * max(added_seconds):.0f} ms more"
    )


def test_redis_was_never_there(tmp_path: Path, undisturbed: Life) -> None:
    """C1, connection refused: the teacher starts, and no answer waits."""
    with RedisServer(tmp_path) as server:
        address = server.address
    faulty_life = life(address)
    assert faulty_life.rows == undisturbed.rows
    assert faulty_life.added_seconds < MAX_ADDED_SECONDS
    assert faulty_life.counters["redis_errors"] == 1


@pytest.mark.parametrize("reply", [b"\x00garbage\r\n", b":5\r\n", b"*1\r\n$1\r\na\r\n"])
def test_what_answers_is_not_redis(undisturbed: Life, reply: bytes) -> None:
    """C1: bytes that are not a reply, and replies to another command."""

    async def main() -> None:
        async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):
                while await reader.read(100):
                    writer.write(reply * 3)
            writer.close()

        liar = await asyncio.start_server(babble, "127.0.0.1", 0)
        port = liar.sockets[0].getsockname()[1]
        async with liar:
            faulty_life = await asyncio.to_thread(life, f"127.0.0.1:{port}")
        assert faulty_life.rows == undisturbed.rows
        assert faulty_life.counters["redis_errors"] == 1

    asyncio.run(main())


def test_it_comes_back(
    server: RedisServer, undisturbed: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a fault of half a second and a pause of 50 ms, the cache is used again."""
    monkeypatch.setattr("teacher_service.cache.redis_tier.PAUSE_SECONDS", 0.05)
    life(server.address)

    def restart() -> None:
        server.kill()
        server.start()

    faulty_life = life(server.address, restart)
    assert faulty_life.rows == undisturbed.rows
    # Redis came back empty: later rows were written again.
    assert server.do("DBSIZE") >= 1
    later_life = life(server.address, lambda: time.sleep(0.1))
    assert later_life.counters["redis_errors"] == 0
    assert later_life.counters["redis_hits"] >= 1


MUTATIONS = 10_000 if REPEATS >= 20 else 1000


def mutate(value: bytes, other: bytes, random_: random.Random) -> bytes:
    """Return a value that is wrong for its key."""
    kind = random_.randrange(7)
    changed = bytearray(value)
    at = random_.randrange(len(value))
    match kind:
        case 0 | 1 | 2:
            changed[at] ^= 1 << random_.randrange(8)
        case 3:
            del changed[max(1, at) :]
        case 4:
            changed += random_.randbytes(random_.randint(1, 64))
        case 5:
            changed[at:] = bytes(len(changed) - at)
        case _:
            changed = bytearray(other)
    return bytes(changed)


def test_damaged_values(server: RedisServer, patient: None) -> None:
    """C2. Every damaged value is detected, counted and deleted; none is used."""
    query = QUERIES[0]
    answer = ENGINE.score([query])[0]
    assert not isinstance(answer, Exception)
    rows = encode_rows(answer)
    random_ = random.Random(0)

    async def main() -> dict[str, int]:
        tier = RedisTier(RedisAddress(server.url), ttl_seconds=60)
        cache = RowCache(memory_bytes=0, redis=tier)
        damaged = unchanged = 0
        async with cache:
            with server.client() as admin:
                while damaged < MUTATIONS:
                    keys = [random_.randbytes(32) for _ in range(min(250, MUTATIONS - damaged))]
                    values = {}
                    for key in keys:
                        value = mutate(seal(key, rows), seal(keys[0][::-1], rows), random_)
                        if value == seal(key, rows):
                            unchanged += 1  # zeros overwrote zeros
                        else:
                            values[key] = value
                    admin.mset({name_of(key): value for key, value in values.items()})
                    cached_rows = await asyncio.gather(*(cache.get(key, query) for key in values))
                    assert cached_rows == [None] * len(values)
                    damaged += len(values)
                    await tier.wait_until_written()
        assert unchanged < MUTATIONS / 100
        return dict(cache.counters())

    counters = asyncio.run(main())
    print(f"{counters['redis_corrupt']} of {MUTATIONS} damaged values seen")
    assert (counters["redis_corrupt"], counters["redis_hits"]) == (MUTATIONS, 0)
    assert counters["redis_errors"] == 0
    assert server.do("DBSIZE") == 0


def test_the_oracle_of_damage_can_tell(server: RedisServer, patient: None) -> None:
    """An undamaged value is found the same way."""
    query = QUERIES[0]
    rows = life(None).rows[0]
    key = row_key("f", 0, query)
    server.do("SET", name_of(key), seal(key, rows))

    async def main() -> None:
        async with RowCache(
            memory_bytes=0, redis=RedisTier(RedisAddress(server.url), ttl_seconds=60)
        ) as cache:
            cached_rows = await cache.get(key, query)
            assert cached_rows
            assert cached_rows.encoded == rows
            assert len(cached_rows.block) == len(decode_rows(rows, 1 << 20))

    asyncio.run(main())

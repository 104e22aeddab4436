"""Stored rows after disk errors, kills and concurrent processes."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clients.store.store import LogitStore, StoredRows
from protos.errors import Corrupt, WrongState
from protos.rows.codec import decode_rows
from teacher_service.cache.disk_tier import DiskTier
from tests.clients.store.test_store import META, ROOT, entry
from tests.faults.conftest import REPEATS
from tests.small_disk import small_disk

MUTATIONS = 10_000 if REPEATS >= 20 else 300
ENTRIES = [entry(number) for number in range(6)]


def read_verified(store: LogitStore) -> list[StoredRows]:
    """Read and decode all entries. Raises Corrupt."""
    entries = list(store)
    for stored in entries:
        decode_rows(stored.rows, 1 << 20)
    return entries


def read_usable(path: Path) -> tuple[list[StoredRows], bool]:
    """Return the entries that a reader can read, and whether it noticed any damage."""
    readable = []
    with LogitStore(path) as store:
        is_damaged = bool(store.unreadable)
        for expected in ENTRIES:
            try:
                rows = store.get(expected.key)
                if rows is not None:
                    decode_rows(rows, 1 << 20)
                    readable.append(replace(expected, rows=rows))
            except Corrupt:
                is_damaged = True
    return readable, is_damaged


def flip_bit(data: bytes, random_: random.Random) -> bytes:
    at = random_.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random_.randrange(8)]) + data[at + 1 :]


def zero_tail(data: bytes, random_: random.Random) -> bytes:
    at = random_.randrange(len(data) - 8)
    return data[:at] + bytes(len(data) - at)


def truncate(data: bytes, random_: random.Random) -> bytes:
    return data[: random_.randrange(len(data))]


def damage_footer(data: bytes, random_: random.Random) -> bytes:
    """Replace the footer by random bytes: Arrow reads such a file without an error."""
    footer = int.from_bytes(data[-10:-6], "little") + 10
    return data[:-footer] + random_.randbytes(random_.randrange(footer))


def test_damaged_shards(tmp_path: Path) -> None:
    """C4. No damaged entry is used. Damage that a reader does not notice is in bytes without
    meaning, which only `verify` checks.
    """
    with LogitStore(tmp_path, write=True, metadata=META) as store:
        store.append(ENTRIES)
    shard = tmp_path / "00000000.arrow"
    data = shard.read_bytes()
    random_ = random.Random(0)
    damages = [flip_bit] * 7 + [zero_tail, truncate, damage_footer]
    by_reading = by_verify = 0
    for number in range(MUTATIONS):
        shard.write_bytes(damages[number % len(damages)](data, random_))
        readable, is_damaged = read_usable(tmp_path)
        assert [stored for stored in readable if stored not in ENTRIES] == []
        if is_damaged:
            by_reading += 1
            continue
        assert readable == ENTRIES
        with LogitStore(tmp_path) as store:
            assert read_verified(store) == ENTRIES
            with pytest.raises(Corrupt):
                store.verify()
        by_verify += 1
    assert by_reading > 0.8 * MUTATIONS
    print(
        f"{by_reading + by_verify} of {MUTATIONS} damaged shards seen: {by_reading} by a reader,"
        f" {by_verify} in bytes without meaning by verify(); 0 wrong rows used"
    )


def test_a_damaged_shard_is_set_aside_and_its_rows_written_again(tmp_path: Path) -> None:
    with LogitStore(tmp_path, write=True, metadata=META) as store:
        store.append(ENTRIES[:3])
        store.append(ENTRIES[3:])
    shard = tmp_path / "00000000.arrow"
    shard.write_bytes(shard.read_bytes()[:-20])
    with LogitStore(tmp_path, write=True, metadata=META) as store:
        assert store.unreadable == ["00000000.arrow"]
        assert read_verified(store) == ENTRIES[3:]
        store.append(ENTRIES[:3])
    with LogitStore(tmp_path) as store:
        assert store.unreadable == []
        assert read_verified(store) == ENTRIES[3:] + ENTRIES[:3]
    assert (tmp_path / "00000000.arrow.damaged").exists()


def grow(tier: DiskTier, numbers: range) -> list[bytes]:
    entries = [entry(number, rows=200) for number in numbers]
    for stored in entries:
        tier.put(stored)
    return [stored.key for stored in entries]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with small_disk(tmp_path / "disk", "256k") as mounted:
        yield mounted


def test_a_full_disk(tiny_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C5, ENOSPC. No partial shard is listed; with free space the tier continues by itself."""
    monkeypatch.setattr("teacher_service.cache.disk_tier.FLUSH_BYTES", 1)
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(200 << 10))
    tier = DiskTier(tiny_disk, fingerprint="a" * 64, max_bytes=1 << 30)
    path = tiny_disk / ("a" * 32)
    grow(tier, range(40))
    # Each entry is a shard of its own: stored, or counted as an error.
    wait_until(lambda: tier.counts.errors + len(tier._store) == 40)
    assert tier.counts.errors >= 5
    with LogitStore(path) as store:
        store.verify()
        stored_count = len(read_verified(store))
    assert 0 < stored_count < 40
    # The last temporary file is removed after its error is counted.
    wait_until(lambda: not list(path.glob("*.tmp")))
    ballast.unlink()
    keys = grow(tier, range(40, 45))
    wait_until(lambda: all(key in tier for key in keys))
    asyncio.run(tier.close())
    with LogitStore(path) as store:
        store.verify()
        assert len(read_verified(store)) == stored_count + 5
    assert len(list(path.glob("*.arrow"))) == stored_count + 5
    print(f"ENOSPC: {tier.counts.errors} shards refused, {stored_count + 5} whole, 0 partial")


def test_a_file_may_not_grow(tmp_path: Path) -> None:
    """C5, EFBIG."""
    limit = 4096
    old_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with LogitStore(tmp_path, write=True, metadata=META) as store:
        store.append([entry(1)])
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old_limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                store.append([entry(2, rows=200)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old_limits)
        assert read_verified(store) == [entry(1)]
        store.append([entry(3)])
    with LogitStore(tmp_path) as store:
        store.verify()
        assert read_verified(store) == [entry(1), entry(3)]
    assert list(tmp_path.glob("*.tmp")) == []


OPERATIONS = ("open", "fsync", "rename")


def test_an_error_at_every_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C5, EIO at the n-th open, fsync or rename of the writer, n = 1..30: each append succeeds or
    fails completely, and a reader sees only intact shards.
    """
    failure_count = 0
    for n in range(1, 31):
        path = tmp_path / str(n)
        remaining = n

        def make_failing(real: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **options: object) -> object:
                nonlocal remaining
                remaining -= 1
                if remaining == 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return real(*args, **options)

            return call

        acknowledged = []
        with LogitStore(path, write=True, metadata=META) as store:
            with monkeypatch.context() as patch:
                for name in OPERATIONS:
                    target = os if name == "fsync" else Path
                    patch.setattr(target, name, make_failing(getattr(target, name)))
                for number in range(5):
                    try:
                        store.append([entry(number)])
                        acknowledged.append(entry(number))
                    except OSError:
                        failure_count += 1
            assert read_verified(store) == acknowledged
            with LogitStore(path) as reader:
                reader.verify()
                assert reader.unreadable == []
                assert set(acknowledged) <= set(read_verified(reader))
            store.append([entry(9)])
        with LogitStore(path, write=True, metadata=META) as store:
            assert {*acknowledged, entry(9)} <= set(read_verified(store))
        assert list(path.glob("*.tmp")) == []
        shard_names = {file.name for file in path.glob("*.arrow")}
        assert len(shard_names) in (len(acknowledged) + 1, len(acknowledged) + 2)
    assert failure_count >= 25
    print(f"EIO: {failure_count} of 30 appends refused, 0 partial shards")


WRITERS = """
import os, sys
from clients.store.store import LogitStore
from tests.clients.store.test_store import META, entry
for path in sys.stdin:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        print("dead", flush=True)
        continue
    with LogitStore(path.strip(), write=True, metadata=META) as store:
        count = len(store)
        print(os.getpid(), flush=True)
        while True:
            store.append([entry(number, rows=50) for number in range(count, count + 5)])
            count += 5
            os.write(1, f"{count}\\n".encode())  # one call: a kill cuts no line
"""


def test_killed_while_it_writes(tmp_path: Path) -> None:
    """C6. SIGKILL at a random time after a random shard: finished shards are intact; unfinished
    ones are removed by the next writer.
    """
    random_ = random.Random(0)
    orphans = max_unreported = 0
    command = [sys.executable, "-c", WRITERS]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as forks:
        assert forks.stdin
        assert forks.stdout
        for repeat in range(REPEATS):
            path = tmp_path / str(repeat // 10)
            forks.stdin.write(f"{path}\n")
            forks.stdin.flush()
            pid = int(forks.stdout.readline())
            lines = [int(forks.stdout.readline()) for _ in range(random_.randint(1, 4))]
            time.sleep(random_.uniform(0, 0.002))
            os.kill(pid, signal.SIGKILL)
            for line in iter(forks.stdout.readline, "dead\n"):
                lines.append(int(line))
            with LogitStore(path) as store:
                store.verify()
                assert store.unreadable == []
                stored = read_verified(store)
            assert stored == [entry(number, rows=50) for number in range(len(stored))]
            assert len(stored) >= lines[-1]
            max_unreported = max(max_unreported, len(stored) - lines[-1])
            manifest = (path / "manifest.json").read_text()
            files = {file.name for file in path.iterdir()} - {"manifest.json", "lock"}
            orphans += bool([name for name in files if name not in manifest])
            LogitStore(path, write=True, metadata=META).close()
            assert {file.name for file in path.iterdir()} - {"manifest.json", "lock"} == {
                name for name in files if name in manifest
            }
        forks.stdin.close()
    assert max_unreported <= 5, "at most the shard that was just written and not yet told"
    assert orphans or REPEATS < 20, "no kill hit a write"
    print(f"{REPEATS} kills: {orphans} left half-written files, all removed; every shard whole")


def test_eight_writers_of_the_same_keys(tmp_path: Path) -> None:
    """C7. Only one process opens the directory, others get WrongState; its threads may all put."""
    tier = DiskTier(tmp_path, fingerprint="a" * 64, max_bytes=1 << 30)
    entries = [entry(number) for number in range(50)]

    def put_all() -> None:
        for stored in entries:
            tier.put(stored)

    threads = [threading.Thread(target=put_all) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(7):
        with pytest.raises(WrongState):
            DiskTier(tmp_path, fingerprint="a" * 64, max_bytes=1 << 30)
    for thread in threads:
        thread.join()
    asyncio.run(tier.close())
    with LogitStore(tmp_path / ("a" * 32)) as store:
        assert sorted(read_verified(store), key=lambda stored: stored.key) == entries
        assert [file.count for file in store._facts] == [50]


def test_rows_are_read_while_the_oldest_go(tmp_path: Path) -> None:
    """C10. A reader with an open store can read all of it, however many shards are removed; a
    reader that opens it meanwhile sees an intact store.
    """
    with LogitStore(tmp_path, write=True, metadata=META) as writer:
        for number in range(20):
            writer.append([entry(number)])
        reader = LogitStore(tmp_path)
        stop = threading.Event()

        def collect_garbage() -> None:
            for number in range(20, 20 + 10 * REPEATS):
                writer.append([entry(number)])
                writer.drop_oldest()
            stop.set()

        thread = threading.Thread(target=collect_garbage)
        thread.start()
        reader_count = 0
        while not stop.is_set():
            assert read_verified(reader) == [entry(number) for number in range(20)]
            with LogitStore(tmp_path) as late_reader:
                assert late_reader.unreadable == []
                assert len(read_verified(late_reader)) in (19, 20, 21)
            reader_count += 1
        thread.join()
    assert reader_count > 5
    print(f"{10 * REPEATS} shards removed, {reader_count} readers: 0 errors")


def store_of(root: Path, name: str, size: int, *, age: float) -> Path:
    path = root / (name * 32)
    with LogitStore(path, write=True, metadata={"fingerprint": name * 64}) as store:
        store.append([StoredRows(bytes(32), b"", 1, bytes(size))])
    os.utime(path / "lock", times=(time.time() - age,) * 2)
    return path


def test_rows_of_other_teachers_make_room(tmp_path: Path) -> None:
    """The least recently used store goes first; stores in use and other directories stay."""
    oldest = store_of(tmp_path, "1", 50_000, age=300)
    used_store = store_of(tmp_path, "2", 50_000, age=200)
    newer = store_of(tmp_path, "3", 50_000, age=100)
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "lock").write_bytes(bytes(50_000))
    reader = LogitStore(oldest)
    with LogitStore(used_store, write=True):
        os.utime(used_store / "lock", times=(0, 0))
        tier = DiskTier(tmp_path, fingerprint="a" * 64, max_bytes=120_000)
        tier.put(StoredRows(bytes(32), b"", 1, bytes(50_000)))
        asyncio.run(tier.close())
    assert not oldest.exists()
    assert used_store.exists()
    assert newer.exists()
    assert photos.exists()
    assert tier.counts.removed == 1
    assert reader.get(bytes(32)) == bytes(50_000)
    tier = DiskTier(tmp_path, fingerprint="a" * 64, max_bytes=60_000)
    asyncio.run(tier.close())
    assert not used_store.exists()
    assert not newer.exists()
    assert tier.counts.removed == 2
    with LogitStore(tmp_path / ("a" * 32)) as store:
        assert len(store) == 1

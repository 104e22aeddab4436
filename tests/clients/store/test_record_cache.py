"""The cache of records: made once, verified, and never a source of other values."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from clients.cli.app import main
from clients.data.records import DataSet
from clients.store import record_cache
from clients.store.copies import cache_directory
from clients.store.record_cache import States, open_records, read_check, write_check
from protos.errors import Corrupt, ExitCode, InvalidInput
from tests.small_disk import small_disk

RECORDS = [
    {"prompt": f"{n}", "answer": n / 7, "more": [None, {"a": n, "b": "\u20ac"}]}
    for n in range(9000)
]


def write(path: Path, records: list[Any] = RECORDS) -> DataSet:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataSet(str(path))


def file_of(records: Any) -> Path:
    path: Path = records.directory / "records.arrow"
    return path


def test_records_are_those_of_the_file(tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl")
    for _ in range(2):
        records = open_records(data, [])
        assert list(records) == list(data.rows([]))
        assert len(records) == len(RECORDS)
        for index in (0, 1, 4095, 4096, 8999):
            assert records[index] == (f"row {index + 1} of {tmp_path}/a.jsonl", RECORDS[index])


def test_other_users_cannot_read_the_cache(tmp_path: Path) -> None:
    """Whatever the umask; a directory that exists keeps its mode."""
    data, umask = write(tmp_path / "a.jsonl"), os.umask(0o002)
    try:
        open_records(data, ["prompt"])
        assert cache_directory().stat().st_mode & 0o777 == 0o700
        cache_directory().chmod(0o2770)
        open_records(data, ["prompt", "answer"])
        assert cache_directory().stat().st_mode & 0o7777 == 0o2770
    finally:
        os.umask(umask)


def test_the_same_file_is_mapped_by_later_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "a.jsonl")
    first = file_of(open_records(data, [])).stat()
    monkeypatch.setattr(record_cache, "_make", None)
    assert file_of(open_records(data, [])).stat().st_ino == first.st_ino


def test_bytes_and_nested_values_of_parquet(tmp_path: Path) -> None:
    values = [{"image": b"\x00\xff", "n": {"a": None, "b": [1]}}, {"image": None, "n": {"a": 2}}]
    pyarrow.parquet.write_table(pa.Table.from_pylist(values), tmp_path / "a.parquet")
    data = DataSet(str(tmp_path / "a.parquet"))
    assert [record for _, record in open_records(data, [])] == [*data.records([])]


def test_values_that_json_does_not_have_are_held_in_memory(tmp_path: Path) -> None:
    table = pa.table({"day": pa.array([1, 2], pa.date32()), "prompt": ["a", "b"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    data = DataSet(str(tmp_path / "a.parquet"))
    records = open_records(data, [])
    assert (records.directory, list(records)) == (None, list(data.rows([])))


def test_a_changed_file_with_the_same_size_and_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    data = write(path, RECORDS[:9])
    past = time.time() - 1000
    os.utime(path, (past, past))
    # As if it had been hashed long after the change, so that the hash is remembered.
    record_cache._CLOCK_SECONDS, seconds = -10.0, record_cache._CLOCK_SECONDS
    try:
        open_records(data, [])
        size = path.stat().st_size
        write(path, [*RECORDS[:8], {**RECORDS[8], "prompt": "X"}])
        os.utime(path, (past, past))
        assert path.stat().st_size == size
        assert open_records(data, [])[8][1]["prompt"] == "X"
    finally:
        record_cache._CLOCK_SECONDS = seconds


@pytest.mark.parametrize("damage", ["cut", "footer", "facts", "missing"])
def test_a_damaged_file_is_made_again(damage: str, tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl")
    path = file_of(open_records(data, []))
    content = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "footer":
            path.write_bytes(content[:-40] + b"\xff" * 40)
        case "facts":
            (path.parent / "facts.json").write_text("{")
        case "missing":
            path.unlink()
    assert list(open_records(data, [])) == list(data.rows([]))


def test_no_flipped_byte_gives_another_record(tmp_path: Path) -> None:
    """Bytes of texts, rows and checksums: the record is refused, and the next attempt is right."""
    data = write(tmp_path / "a.jsonl", RECORDS[:50])
    path = file_of(open_records(data, []))
    content, expected = path.read_bytes(), list(data.rows([]))
    refused = 0
    for place in range(400, len(content) - 400, 97):
        changed = bytearray(content)
        changed[place] ^= 0x10
        path.write_bytes(changed)
        try:
            assert list(open_records(data, [])) == expected  # padding, or made again at once
        except Corrupt:
            refused += 1
            assert list(open_records(data, [])) == expected
            content = path.read_bytes()
    assert refused > 20


MAKE = """
import sys
from clients.data.records import DataSet
from clients.store.record_cache import open_records
records = open_records(DataSet(sys.argv[1]), [])
print(len(records), sum(len(record["prompt"]) for _, record in records))
assert "pandas" not in sys.modules, "40 MiB of a process"
"""


def start(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAKE, str(path)], stdout=subprocess.PIPE, text=True
    )


def test_it_is_killed_while_it_is_made(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    data = write(path, RECORDS * 5)
    process = start(path)
    cache = record_cache.records_directory()
    while process.poll() is None and not list(cache.glob("*/records.arrow.tmp")):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert list(cache.glob("*/records.arrow.tmp"))
    records = open_records(data, [])
    assert [record for _, record in records] == RECORDS * 5
    assert not list(cache.glob("*/*.tmp"))


def test_two_jobs_make_it_at_once(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    processes = [start(tmp_path / "a.jsonl") for _ in range(3)]
    expected = f"{len(RECORDS)} {sum(len(record['prompt']) for record in RECORDS)}\n"
    assert [process.communicate()[0] for process in processes] == [expected] * 3
    assert len(list(record_cache.records_directory().glob("*/records.arrow"))) == 1


def test_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = write(tmp_path / "a.jsonl")

    def fill(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fill)
        records = open_records(data, [])
    assert list(records) == list(data.rows([]))
    assert records[4096] == (f"row 4097 of {tmp_path}/a.jsonl", RECORDS[4096])
    assert "in memory: [Errno 28] No space left on device. Set XDG_CACHE_HOME" in caplog.text
    assert not list(record_cache.records_directory().glob("*/records.arrow*"))
    assert list(open_records(data, [])) == list(data.rows([]))
    assert list(record_cache.records_directory().glob("*/records.arrow"))


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = write(tmp_path / "a.jsonl", RECORDS[:9])
    cached = open_records(data, [])

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert list(open_records(data, [])) == list(data.rows([]))
    assert "in memory: the file system of" in caplog.text
    with cached.locked():
        pass


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    data = write(tmp_path / "a.jsonl", RECORDS[:9])
    assert list(open_records(data, [])) == list(data.rows([]))


def test_without_a_writable_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    data = write(tmp_path / "a.jsonl", RECORDS[:9])
    assert list(open_records(data, [])) == list(data.rows([]))
    assert "each process holds the records of" in caplog.text


def test_a_broken_record_names_its_place_and_leaves_no_file(tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl")
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"prompt": \n')
    with pytest.raises(InvalidInput, match=rf"^data.path: {tmp_path}/a.jsonl:9001 is not JSON"):
        open_records(data, [])
    assert not list(record_cache.records_directory().glob("*/records.arrow*"))


def test_results_of_checks(tmp_path: Path) -> None:
    records = open_records(write(tmp_path / "a.jsonl"), [])
    assert read_check(records, "k") is None
    write_check(records, "k", {"too long": 3})
    assert read_check(records, "k") == {"too long": 3}
    [path] = records.directory.glob("checks-*") if records.directory else []
    path.write_text(path.read_text().replace("3", "4", 1))
    assert read_check(records, "k") is None


def test_states_are_kept_and_damage_is_no_state(tmp_path: Path) -> None:
    records = open_records(write(tmp_path / "a.jsonl", RECORDS[:9]), [])
    states = States(records, "k")
    states.set(3, used=True)
    states.set(5, used=False)
    again = States(records, "k")
    assert [again.is_known(index) for index in range(9)] == [n in (3, 5) for n in range(9)]
    assert (again.values[3], again.values[5]) == (States.USED, States.LEFT_OUT)
    [path] = records.directory.glob("states-*") if records.directory else []
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    assert not any(States(records, "k").is_known(index) for index in range(9))
    assert not States(records, "other").is_known(3)


def test_states_on_a_full_disk_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of a mapped file that gets no space would end the process."""
    with small_disk(tmp_path / "disk", "256k") as disk:
        monkeypatch.setenv("XDG_CACHE_HOME", str(disk))
        records = open_records(write(tmp_path / "a.jsonl"), ["prompt"])
        assert records.directory is None, "the disk is too small for the copy"
        records = open_records(write(tmp_path / "a.jsonl", RECORDS[:9]), ["prompt"])
        with suppress(OSError), (disk / "other").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):  # until the disk is full
                pass
        states = States(records, "k")
        states.set(3, used=True)
        assert [states.is_known(index) for index in range(9)] == [n == 3 for n in range(9)]


def test_the_command_tells_the_size_and_clears_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = open_records(write(tmp_path / "a.jsonl"), [])
    assert main(["cache"]) == ExitCode.OK
    place, line = capsys.readouterr().out.splitlines()
    assert (place, line.split()[0]) == (str(cache_directory()), "records:")
    assert main(["cache", "--clear"]) == ExitCode.OK
    assert not file_of(records).exists()
    assert records[8999][1] == RECORDS[8999], "a running job keeps the file that it has open"
    assert open_records(write(tmp_path / "a.jsonl"), [])[0][1] == RECORDS[0]

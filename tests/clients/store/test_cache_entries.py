"""Cached records that are deleted while jobs use them, and locks of suspended processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from clients.cli.app import main
from clients.store import cache_entries, record_cache
from clients.store.cache_entries import LOCK, UNUSED_DAYS, locked_entry
from clients.store.record_cache import open_records, read_check, write_check
from protos.errors import ExitCode
from tests.clients.store.test_record_cache import RECORDS, write

HOLD = """
import sys
from pathlib import Path
from clients.store.cache_entries import locked_entry
with locked_entry(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextmanager
def lock_process(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that takes the lock of a directory, writes a line, and holds it until killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_line(process: subprocess.Popen[str]) -> None:
    """Wait until a process has the lock."""
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"


def wait_until_open(process: subprocess.Popen[str], path: Path) -> None:
    """Wait until a process has opened the file."""
    while True:
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                if os.readlink(link) == str(path):
                    return
        time.sleep(0.001)


@pytest.mark.parametrize("moment", ["made", "checked"])
def test_the_cache_is_deleted_by_hand(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "a.jsonl")
    if moment == "made":
        rename = Path.rename

        def delete_first(path: Path, target: Path) -> Path:
            shutil.rmtree(record_cache.records_directory())
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", delete_first)
    records = open_records(data, [])
    shutil.rmtree(record_cache.records_directory(), ignore_errors=True)
    with records.locked():
        assert read_check(records, "k") is None
        write_check(records, "k", {"too long": 3})
    assert list(records) == list(data.rows([]))
    monkeypatch.undo()
    assert list(open_records(data, [])) == list(data.rows([]))


def test_the_command_keeps_what_a_process_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = open_records(write(tmp_path / "a.jsonl"), [])
    unused = open_records(write(tmp_path / "b.jsonl", RECORDS[:9]), [])
    assert records.directory
    assert unused.directory
    with locked_entry(records.directory):
        assert main(["cache", "--clear"]) == ExitCode.OK
        assert capsys.readouterr().out.endswith("and that are kept: 1\n")
        assert (records.directory / "records.arrow").exists()
        assert os.listdir(record_cache.records_directory()) == [records.directory.name]
    assert main(["cache", "--clear"]) == ExitCode.OK
    assert os.listdir(record_cache.records_directory()) == []


def test_a_cache_that_cannot_be_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, its size was 0."""
    records = open_records(write(tmp_path / "a.jsonl"), [])
    capsys.readouterr()
    list_directory = os.scandir

    def scandir(path: Any) -> Any:  # root may read everything
        if Path(path) == records.directory:
            raise PermissionError(13, "Permission denied", str(path))
        return list_directory(path)

    monkeypatch.setattr("os.scandir", scandir)
    assert main(["cache"]) == ExitCode.USAGE
    assert f"error: cannot read {records.directory}: Permission denied;" in capsys.readouterr().err


def test_a_process_waits_for_an_entry_that_is_deleted(tmp_path: Path) -> None:
    """The lock of a deleted directory locks nothing: the process locks the next directory."""
    directory = tmp_path / "entry"
    with lock_process(directory) as first, lock_process(directory) as second:
        for process in (first, second):
            wait_until_open(process, directory / LOCK)
        shutil.rmtree(directory)
        for process in (first, second):
            wait_for_line(process)
        assert (directory / LOCK).exists()


def test_a_suspended_process_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache_entries, "_SUSPENDED_SECONDS", 0.5)
    monkeypatch.setattr(cache_entries, "_SECONDS_BETWEEN_REPORTS", 0.2)
    data = write(tmp_path / "a.jsonl", RECORDS[:9])
    cached = open_records(data, [])
    assert cached.directory
    caplog.set_level("INFO")
    with lock_process(cached.directory) as process:
        wait_for_line(process)
        process.send_signal(signal.SIGSTOP)
        records = open_records(data, [])
        assert records.directory is None
        assert list(records) == list(data.rows([]))
        assert "waiting for another process" in caplog.text
        assert "has been suspended for" in caplog.text
        with cached.locked():
            pass
    assert open_records(data, []).directory == cached.directory


def test_a_slow_process_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes the time of the lock file, whatever it does."""
    monkeypatch.setattr(cache_entries, "_BEAT_SECONDS", 0.01)
    with locked_entry(tmp_path / "entry"):
        before = (tmp_path / "entry" / LOCK).stat().st_mtime_ns
        while (tmp_path / "entry" / LOCK).stat().st_mtime_ns == before:
            time.sleep(0.01)


def test_unused_records_are_deleted_when_others_are_made(tmp_path: Path) -> None:
    old = open_records(write(tmp_path / "a.jsonl", RECORDS[:9]), [])
    used = open_records(write(tmp_path / "b.jsonl", RECORDS[:10]), [])
    memo = record_cache.records_directory() / "fingerprint-0.json"
    memo.touch()
    assert old.directory
    assert used.directory
    past = time.time() - UNUSED_DAYS * 86400 - 60
    for path in (old.directory / LOCK, used.directory / LOCK, memo):
        os.utime(path, (past, past))
    open_records(write(tmp_path / "b.jsonl", RECORDS[:10]), [])
    open_records(write(tmp_path / "c.jsonl", RECORDS[:11]), [])
    assert not old.directory.exists()
    assert not memo.exists()
    assert used.directory.exists()
    assert old[8][1] == RECORDS[8], "a running job keeps the file that it has open"

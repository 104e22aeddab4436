"""File systems without directory fsync or without locks, as some network file systems are."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from clients.runs.directory import RunDirectory, replace_file
from clients.runs.file_system import lock_file
from clients.store.manifest import lock_store
from clients.store.shards import write_synced
from protos.errors import InvalidInput
from tests.student_trainer import tiny


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_directories_that_cannot_be_synced(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def refuse_directories(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(code, os.strerror(code))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_directories)
    replace_file(tmp_path / "text", "new")
    write_synced(tmp_path / "data", b"new")
    assert (tmp_path / "text").read_text() + (tmp_path / "data").read_text() == "newnew"


def test_a_disk_that_fails_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        replace_file(tmp_path / "text", "new")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_one_sentence(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    material = tiny.Material(tmp_path, tmp_path, tmp_path)
    run = RunDirectory.create(tmp_path / "runs", tiny.sft_job(material))
    for act in (lambda: run.held().__enter__(), lambda: lock_store(tmp_path / "store")):
        with pytest.raises(InvalidInput, match="has no file locks"):
            act()


def test_a_lock_that_another_holds(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as first, path.open("w") as second:
        lock_file(first, path, wait=False)
        with pytest.raises(BlockingIOError):
            lock_file(second, path, wait=False)

"""A backup under load: what the server acknowledged before it is in it, and it can be restored."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from clients.jobs.client import DistillClient
from clients.jobs.job import JobState
from clients.runs.directory import RunDirectory
from distill_server.retention.backup import back_up
from protos.errors import InvalidInput, NotFound
from tests.distill_server.conftest import Server, eventually, job_config

BEFORE = 40  # jobs


def test_restored_under_load(make_server: Callable[..., Server], tmp_path: Path) -> None:
    server = make_server(slots=2)
    acknowledged: list[str] = []
    over = threading.Event()

    def load() -> None:
        with DistillClient(server.address) as client:
            while not over.is_set():
                acknowledged.append(client.submit(job_config(max_steps=3)).id)

    thread = threading.Thread(target=load)
    thread.start()
    copy = tmp_path / "copy" / "server.sqlite"
    copy.parent.mkdir()
    try:
        eventually(lambda: len(acknowledged) >= BEFORE)
        with DistillClient(server.address) as client:
            known = {job_id: client.history(job_id) for job_id in acknowledged[:8]}
        before = list(acknowledged)
        command = [sys.executable, "-m", "distill_server", "--runs", str(server.runs)]
        done = subprocess.run(
            [*command, "--backup", str(copy)], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
    finally:
        over.set()
        thread.join()
    server.kill()
    # The database first, then the directories: each job in the copy has its own. No trainer may
    # replace a file while it is copied, so the two that run end first.
    runs = [RunDirectory(path) for path in server.runs.glob("on-policy-*")]
    eventually(lambda: all(has_ended(run) for run in runs), 60)
    for run in runs:
        shutil.copytree(run.path, copy.parent / run.path.name)
    restored = Server(copy.parent, slots=2)
    try:
        restored.start()
        with DistillClient(restored.address) as client:
            found = {job.id: job for job in client.list(limit=10_000)}
            assert set(before) <= found.keys()
            for job_id, events in known.items():
                again = client.history(job_id)
                assert [*again[: len(events)]] == [*events], "no event from before is lost"
            last = client.wait(before[0], 60)
            assert last.state is JobState.SUCCEEDED
    finally:
        restored.clean_up()


def has_ended(run: RunDirectory) -> bool:
    """Whether no trainer has begun, or the one that did has told its end."""
    status = run.read_status()
    if status is None:
        return not run.logs(1).exists()
    return status.verdict == "succeeded"


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no job database"):
        back_up(tmp_path / "server.sqlite", tmp_path / "copy")
    (tmp_path / "server.sqlite").touch()
    (tmp_path / "copy").touch()
    with pytest.raises(InvalidInput, match=r"--backup: .* exists"):
        back_up(tmp_path / "server.sqlite", tmp_path / "copy")
    assert {path.name for path in tmp_path.iterdir()} == {"server.sqlite", "copy"}

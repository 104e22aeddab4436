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
    # The database first, then the directories: each job in the copy has its own. Trainers have
    # ended, for a file that one replaces while it is copied would be a fault of `copytree`.
    with DistillClient(server.address) as client:
        for job_id in acknowledged:
            client.wait(job_id, 120)
    for run in server.runs.glob("on-policy-*"):
        shutil.copytree(run, copy.parent / run.name)
    server.kill()
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


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no job database"):
        back_up(tmp_path / "server.sqlite", tmp_path / "copy")
    (tmp_path / "server.sqlite").touch()
    (tmp_path / "copy").touch()
    with pytest.raises(InvalidInput, match=r"--backup: .* exists"):
        back_up(tmp_path / "server.sqlite", tmp_path / "copy")
    assert {path.name for path in tmp_path.iterdir()} == {"server.sqlite", "copy"}

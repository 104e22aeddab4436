"""A backup under load has all jobs acknowledged before it, and can be restored."""

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
from distill_server.jobs.database import back_up
from protos.errors import InvalidInput, NotFound
from tests.distill_server.conftest import Server, eventually, job_config

MIN_JOBS = 40


def test_restored_under_load(make_server: Callable[..., Server], tmp_path: Path) -> None:
    server = make_server(slots=2)
    acknowledged: list[str] = []
    stop = threading.Event()

    def load() -> None:
        with DistillClient(server.address) as client:
            while not stop.is_set():
                acknowledged.append(client.submit(job_config(max_steps=3)).id)

    thread = threading.Thread(target=load)
    thread.start()
    database_copy = tmp_path / "copy" / "server.sqlite"
    database_copy.parent.mkdir()
    try:
        eventually(lambda: len(acknowledged) >= MIN_JOBS)
        with DistillClient(server.address) as client:
            histories = {job_id: client.history(job_id) for job_id in acknowledged[:8]}
        acknowledged_before = list(acknowledged)
        command = [sys.executable, "-m", "distill_server", "--runs", str(server.runs)]
        process = subprocess.run(
            [*command, "--backup", str(database_copy)], capture_output=True, text=True, timeout=120
        )
        assert process.returncode == 0, process.stderr
    finally:
        stop.set()
        thread.join()
    server.kill()
    # The database first, then the directories: each job in the copy has its directory. No trainer
    # may replace a file during the copy, so wait until the running ones have ended.
    runs = [RunDirectory(path) for path in server.runs.glob("on-policy-*")]
    eventually(lambda: all(has_ended(run) for run in runs), 60)
    for run in runs:
        shutil.copytree(run.path, database_copy.parent / run.path.name)
    restored_server = Server(database_copy.parent, slots=2)
    try:
        restored_server.start()
        with DistillClient(restored_server.address) as client:
            jobs = {job.id: job for job in client.list(limit=10_000)}
            assert set(acknowledged_before) <= jobs.keys()
            for job_id, events in histories.items():
                history = client.history(job_id)
                assert [*history[: len(events)]] == [*events], "no event from before is lost"
            final_job = client.wait(acknowledged_before[0], 60)
            assert final_job.state is JobState.SUCCEEDED
    finally:
        restored_server.clean_up()


def has_ended(run: RunDirectory) -> bool:
    """Whether no trainer has started, or the started one has succeeded."""
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

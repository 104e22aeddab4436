"""Files and disks of one job fail or hang: nothing is lost, and no other job waits."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from clients.jobs.client import DistillClient
from clients.jobs.job import JobState
from clients.runs.directory import RunDirectory
from distill_server.jobs.run_files import RunFiles
from distill_server.jobs.store import Change
from distill_server.runners.interface import Exited, Outcome
from distill_server.runners.machine import Machine
from distill_server.scheduler import Policy
from protos.errors import Unavailable
from tests.distill_server.conftest import Server, eventually, job_config
from tests.distill_server.scripted_runner import ScriptedRunner, SmallServer, small_server


def submit(server: SmallServer) -> str:
    return server.control.submit(job_config().model_dump_json(), "", "").id


def write_steps(server: SmallServer, job_id: str, *steps: int) -> None:
    with (server.runs / job_id / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"attempt": 1, "step": {step}, "loss": 1.0}}\n' for step in steps)


def steps_of(server: SmallServer, job_id: str) -> list[int]:
    return [event.step for event in server.store.events(job_id, 0, 999) if event.metrics]


def test_a_full_database_loses_no_step_and_doubles_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill_server.scheduler._TROUBLE_SECONDS", 0.0)
    with small_server(tmp_path, Policy()) as server:
        job_id = submit(server)
        server.look()
        write_steps(server, job_id, *range(1, 4))
        server.look()
        pages = server.store._db.execute("PRAGMA page_count").fetchone()[0]
        server.store._db.execute(f"PRAGMA max_page_count = {pages}")
        write_steps(server, job_id, *range(4, 200))
        server.look()
        server.look()
        assert steps_of(server, job_id) == [1, 2, 3]
        server.store._db.execute("PRAGMA max_page_count = 100000")
        write_steps(server, job_id, *range(200, 210))
        server.look()
        assert steps_of(server, job_id) == list(range(1, 210))
        server.runner.end(job_id, Exited(0))
        server.look()
        assert steps_of(server, job_id) == list(range(1, 210))


@pytest.mark.parametrize("name", ["status.json", "metrics.jsonl", "control.json"])
def test_a_pipe_in_place_of_a_file(make_server: Callable[..., Server], name: str) -> None:
    """The pipe is not opened; the job, its cancel and all other jobs continue."""
    server = make_server(slots=2)
    with DistillClient(server.address, timeout=20) as client:
        job = client.submit(job_config("hang_at=3", max_steps=10))
        eventually(lambda: client.get(job.id).step >= 2)
        pipe = server.runs / job.id / "pipe"
        os.mkfifo(pipe)
        pipe.replace(server.runs / job.id / name)
        other_job = client.submit(job_config("other", max_steps=3))
        assert client.wait(other_job.id, timeout=60).state is JobState.SUCCEEDED
        client.cancel(job.id, now=True)
        assert client.wait(job.id, timeout=60).state is JobState.CANCELLED


class SilentRunner(ScriptedRunner):
    """The directory of one job does not answer until `answers` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.silent, self.answers, self.blocked = "", threading.Event(), 0

    def poll(self, run: RunDirectory, attempt: int) -> Outcome:
        if run.path.name == self.silent:
            self.blocked += 1
            self.answers.wait(120)
        return super().poll(run, attempt)


def test_a_directory_that_hangs_holds_up_its_own_job_only(tmp_path: Path) -> None:
    runner = SilentRunner()
    server = SmallServer(tmp_path, runner, Policy(Machine(slots=2)), files=RunFiles(0.2))
    try:
        stuck_id, other_id = submit(server), submit(server)
        server.look()
        # With the default, `look` would wait a minute for the thread that hangs.
        server.scheduler._policy = replace(server.policy, poll_every=3.0)
        runner.silent = stuck_id
        server.look()
        phase = server.store.job(stuck_id).phase
        assert phase.startswith("WAITING run directory: no answer since ")
        runner.say(tmp_path, other_id, "succeeded")
        runner.end(other_id, Exited(0))
        for _ in range(3):
            server.look()
        assert server.store.job(other_id).state is JobState.SUCCEEDED
        assert runner.blocked == 1, "one thread for the job, however often it is looked at"
        write_steps(server, stuck_id, 1, 2)
        runner.silent = ""
        runner.answers.set()
        eventually(lambda: server.look() and steps_of(server, stuck_id) == [1, 2])
        runner.say(tmp_path, stuck_id, "running")
        server.look()
        assert server.store.job(stuck_id).phase == "training"
    finally:
        runner.answers.set()
        server.close()


def test_a_call_that_never_returns_is_given_up() -> None:
    files, release = RunFiles(0.05), threading.Event()

    async def ask() -> None:
        for _ in range(256):
            files.start(lambda: release.wait(60))
        with pytest.raises(Unavailable, match="run directory has not answered"):
            await files.call(lambda: None)
        release.set()
        while files._running_calls:
            await asyncio.sleep(0.01)
        with pytest.raises(ZeroDivisionError):
            await files.call(lambda: 1 / 0)
        assert await files.call(lambda: 7) == 7

    asyncio.run(ask())


def test_a_cancel_on_a_full_disk_is_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with small_server(tmp_path, Policy()) as server:
        job_id = submit(server)
        server.look()
        server.store.change(job_id, Change(phase="training"))
        monkeypatch.setattr(RunDirectory, "write_control", raise_disk_full)
        assert server.cancel(job_id, now=False).state is JobState.CANCELLING
        assert server.runner.alive == {}, "it got the signal"
        server.look()
        assert server.store.job(job_id).state is JobState.CANCELLED

"""A runner without processes: how attempts end is told by the test. And a server made of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from clients.runs.directory import RunDirectory, Status, Verdict
from distill_server.jobs.control import JobControl
from distill_server.jobs.database import open_database
from distill_server.jobs.store import Store
from distill_server.runners.interface import Exited, Lost, Outcome, Running
from distill_server.runners.local.runner import LocalRunner
from distill_server.runners.machine import Share
from distill_server.scheduler import Policy, Scheduler


class ScriptedRunner(LocalRunner):
    """Attempts go on until the test ends them; it outlives the servers that use it."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[tuple[str, int], Share] = {}
        self.started: list[tuple[str, int]] = []
        self._ended: dict[tuple[str, int], Exited | Lost] = {}

    def start(
        self,
        run: RunDirectory,
        *,
        attempt: int,
        processes: int,
        from_step: int | None,
        share: Share,
    ) -> None:
        key = (run.path.name, attempt)
        assert key not in self.started, "an attempt starts once"
        assert all(job_id != run.path.name for job_id, _ in self.alive), "two at once"
        self.started.append(key)
        self.alive[key] = share

    def poll(self, run: RunDirectory, attempt: int) -> Outcome:
        key = (run.path.name, attempt)
        if key in self.alive:
            return Running()
        return self._ended.get(key, Lost(blameless=key not in self.started))

    def stop(self, run: RunDirectory, attempt: int, *, now: bool) -> None:
        self.end(run.path.name, Exited(-9))

    def end(self, job_id: str, outcome: Exited | Lost) -> None:
        key = next((key for key in self.alive if key[0] == job_id), None)
        if key is not None:
            del self.alive[key]
            self._ended[key] = outcome

    def say(self, runs: Path, job_id: str, verdict: Verdict, step: int = 1) -> None:
        attempt = next(number for job, number in self.alive if job == job_id)
        status = Status(attempt, verdict, phase="training", step=step, max_steps=5)
        RunDirectory(runs / job_id).write_status(status)


class SmallServer:
    """Store, control and scheduler of one life of a server, without a port."""

    def __init__(self, runs: Path, runner: ScriptedRunner, policy: Policy) -> None:
        self.runs, self.runner, self.policy = runs, runner, policy
        runs.mkdir(exist_ok=True)
        self._open = contextlib.ExitStack()
        self.start()

    def start(self) -> None:
        connection = self._open.enter_context(open_database(self.runs / "server.sqlite"))
        connection.execute("PRAGMA synchronous = OFF")
        self.store = Store(connection, on_change=lambda job_id: None)
        self.scheduler = Scheduler(self.store, self.runs, self.runner, self.policy)
        machine, most_queued = self.policy.machine, self.policy.most_queued
        self.control = JobControl(self.store, self.runs, lambda: None, machine, most_queued)

    def look(self) -> bool:
        return self.scheduler._look()

    def close(self) -> None:
        self._open.close()


@contextlib.contextmanager
def small_server(runs: Path, policy: Policy) -> Iterator[SmallServer]:
    server = SmallServer(runs, ScriptedRunner(), policy)
    try:
        yield server
    finally:
        server.close()

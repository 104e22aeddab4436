"""A runner without processes, whose attempts the test ends, and a server with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from clients.config.kinds import AnyJob
from clients.jobs.job import Job
from clients.runs.directory import RunDirectory, Status, Verdict
from distill_server.jobs.control import JobControl
from distill_server.jobs.database import open_database
from distill_server.jobs.preflight import Preflight, accept_all
from distill_server.jobs.run_files import RunFiles
from distill_server.jobs.store import JobStore
from distill_server.people.quotas import Quotas
from distill_server.runners.interface import Exited, Lost, Outcome, Running
from distill_server.runners.local.runner import LocalRunner
from distill_server.runners.machine import Share
from distill_server.scheduler import Policy, Scheduler
from protos.auth.owners import Quota


class ScriptedRunner(LocalRunner):
    """Attempts run until the test ends them; the runner outlives the servers that use it."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[tuple[str, int], Share] = {}
        self.started: list[tuple[str, int]] = []
        self._outcomes: dict[tuple[str, int], Exited | Lost] = {}

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
        return self._outcomes.get(key, Lost(blameless=key not in self.started))

    def stop(self, run: RunDirectory, attempt: int, *, now: bool) -> None:
        self.end(run.path.name, Exited(-9))

    def end(self, job_id: str, outcome: Exited | Lost) -> None:
        key = next((key for key in self.alive if key[0] == job_id), None)
        if key is not None:
            del self.alive[key]
            self._outcomes[key] = outcome

    def say(self, runs: Path, job_id: str, verdict: Verdict, step: int = 1, code: str = "") -> None:
        attempt = next(number for job, number in self.alive if job == job_id)
        status = Status(attempt, verdict, "training", step, max_steps=5, code=code)
        RunDirectory(runs / job_id).write_status(status)


class SmallServer:
    """JobStore, control and scheduler of a server, without a port; `start` is a restart."""

    def __init__(
        self,
        runs: Path,
        runner: ScriptedRunner,
        policy: Policy,
        preflight: Preflight = accept_all,
        files: RunFiles | None = None,
        quotas: Mapping[str, Quota] = {},
    ) -> None:
        self.quotas = quotas
        # `look` waits for all threads, however busy the machine is.
        self.runs, self.runner, self.policy = runs, runner, replace(policy, poll_every=60)
        self.preflight, self.files = preflight, files or RunFiles()
        runs.mkdir(exist_ok=True)
        self._open = contextlib.ExitStack()
        self.start()

    def start(self) -> None:
        connection = self._open.enter_context(open_database(self.runs / "server.sqlite"))
        connection.execute("PRAGMA synchronous = OFF")
        self._loop = self._open.enter_context(asyncio.Runner())
        self.store = JobStore(connection, on_change=lambda job_id: None)
        quotas = Quotas(connection, self.store, lambda: self.quotas)
        self.scheduler = Scheduler(
            *(self.store, self.runs, self.runner, self.policy, quotas, self.preflight, self.files)
        )
        machine, max_queued = self.policy.machine, self.policy.max_queued
        self.control = JobControl(
            self.store,
            self.runs,
            lambda: None,
            machine,
            max_queued,
            files=self.files,
            stop_trainer=partial(self.runner.stop, now=False),
            preflight=self.preflight,
            let_wait=self.scheduler.waits.begin_at_submit,
            require_quota=quotas.require_gpus,
        )

    def look(self) -> bool:
        """Run the scheduler once with everything it started, and once more if a wait is over."""

        async def look() -> bool:
            self.scheduler._awake.clear()
            busy = await self.scheduler.run_once()
            await self.scheduler.waits.finish_tries()
            return await self.scheduler.run_once() if self.scheduler._awake.is_set() else busy

        return self._loop.run(look())

    def cancel(self, job_id: str, *, now: bool) -> Job:
        return self._loop.run(self.control.cancel(job_id, now=now))

    def submit_checked(self, config: AnyJob) -> Job:
        return self._loop.run(self.control.submit_checked(config.model_dump_json(), "", ""))

    def close(self) -> None:
        """Stop as if killed."""
        self._open.close()


@contextlib.contextmanager
def small_server(
    runs: Path,
    policy: Policy,
    preflight: Preflight = accept_all,
    files: RunFiles | None = None,
    quotas: Mapping[str, Quota] = {},
) -> Iterator[SmallServer]:
    server = SmallServer(runs, ScriptedRunner(), policy, preflight, files, quotas)
    try:
        yield server
    finally:
        server.close()

"""Random actions of people and trainers and deaths of the server: jobs match a model."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from clients.config.kinds import AnyJob
from clients.jobs.job import TERMINAL, JobState
from clients.runs.directory import Verdict
from distill_server.runners.interface import Exited, Lost
from distill_server.runners.machine import Machine
from distill_server.scheduler import Policy
from protos.errors import InvalidInput, Overloaded, Unavailable, WrongState
from tests.distill_server.conftest import job_config
from tests.distill_server.jobs.history import ACTIVE, History
from tests.distill_server.scripted_runner import ScriptedRunner, SmallServer
from tests.faults.conftest import REPEATS

MAX_QUEUED, RETRIES, SLOTS = 4, 1, 2
POLICY = Policy(Machine(slots=SLOTS), MAX_QUEUED, RETRIES, backoff=0.0, wait=0.0, longest_wait=0.0)
KEYS = st.sampled_from(["a", "b", "c", "d", "e", "f"])
WHICH = st.integers(0, 5)


@dataclass
class Model:
    """The expected state of a job."""

    place: int
    priority: int
    state: JobState = JobState.QUEUED
    attempt: int = 1
    retries: int = 0
    # Its teacher was away and has not come back yet.
    waits: bool = False
    # Its last attempt ended so; a server that starts anew asks for the teacher once more.
    was_away: bool = False


class Jobs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        # No machine dies in this test, and fsync for each job would take most of the time.
        self._no_disk = patch("os.fsync")
        self._no_disk.start()
        self._directory = tempfile.TemporaryDirectory()
        self.runs = Path(self._directory.name)
        self.runner = ScriptedRunner()
        self.teacher_is_away = False
        self.server = SmallServer(self.runs, self.runner, POLICY, self.preflight)
        self.models: dict[str, Model] = {}
        self.by_key: dict[str, tuple[str, int]] = {}
        self.places = itertools.count()
        self.history = History()

    async def preflight(self, config: AnyJob, run: Path) -> None:
        if self.teacher_is_away:
            raise Unavailable("no teacher answers", field="teacher.address")

    def teardown(self) -> None:
        self.history.check(self.runs, SLOTS)
        self.server.close()
        self._directory.cleanup()
        self._no_disk.stop()

    def pick(self, which: int) -> tuple[str, Model]:
        return list(self.models.items())[which % len(self.models)]

    def pick_active(self, which: int) -> tuple[str, Model]:
        active = self.in_state(ACTIVE)
        return list(active.items())[which % len(active)]

    def in_state(self, states: Iterable[JobState]) -> dict[str, Model]:
        return {job_id: job for job_id, job in self.models.items() if job.state in states}

    def queue_is_full(self) -> bool:
        return len(self.in_state({JobState.QUEUED})) >= MAX_QUEUED

    @initialize(priorities=st.tuples(*[st.sampled_from([0, 5])] * 3))
    def submit_three(self, priorities: tuple[int, int, int]) -> None:
        for key, priority in zip("abc", priorities, strict=True):
            self.submit(key, priority)

    @rule(key=KEYS, priority=st.sampled_from([0, 0, 5]))
    def submit(self, key: str, priority: int) -> None:
        config = json.dumps(job_config().model_dump() | {"priority": priority})
        earlier_submit = self.by_key.get(key)
        if earlier_submit is not None and earlier_submit[1] != priority:
            with pytest.raises(InvalidInput, match="another job"):
                self.server.control.submit(config, "", key)
            return
        if earlier_submit is None and self.queue_is_full():
            with pytest.raises(Overloaded):
                self.server.control.submit(config, "", key)
            return
        job_id = self.server.control.submit(config, "", key).id
        assert earlier_submit is None or job_id == earlier_submit[0]
        self.history.submitted(key, job_id)
        if earlier_submit is None:
            self.by_key[key] = (job_id, priority)
            self.models[job_id] = Model(next(self.places), priority)

    @precondition(lambda self: self.models)
    @rule(which=WHICH, now=st.booleans())
    def cancel(self, which: int, now: bool) -> None:
        job_id, job = self.pick(which)
        if job.state in (JobState.SUCCEEDED, JobState.FAILED):
            with pytest.raises(WrongState):
                self.server.cancel(job_id, now=now)
            return
        self.server.cancel(job_id, now=now)
        if job.state is JobState.QUEUED:
            job.state = JobState.CANCELLED
        elif job.state in ACTIVE:
            job.state = JobState.CANCELLING

    @precondition(lambda self: self.models)
    @rule(which=WHICH)
    def resume(self, which: int) -> None:
        job_id, job = self.pick(which)
        if job.state not in (JobState.FAILED, JobState.CANCELLED):
            with pytest.raises(WrongState):
                self.server.control.resume(job_id, max_steps=0, from_step=0)
        elif self.queue_is_full():
            with pytest.raises(Overloaded):
                self.server.control.resume(job_id, max_steps=0, from_step=0)
        else:
            self.history.resumed(job_id)
            self.server.control.resume(job_id, max_steps=0, from_step=0)
            job.state, job.attempt, job.retries = JobState.QUEUED, job.attempt + 1, 0
            job.place, job.waits, job.was_away = next(self.places), False, False

    @rule(away=st.booleans())
    def teacher_goes_or_returns(self, away: bool) -> None:
        self.teacher_is_away = away

    @rule()
    def look(self) -> None:
        self.server.look()
        self.start_queued()

    def start_queued(self) -> None:
        self.start_those_that_wait_for_nothing()
        if not self.teacher_is_away:
            for job in self.in_state({JobState.QUEUED}).values():
                job.waits = False
        self.start_those_that_wait_for_nothing()

    def start_those_that_wait_for_nothing(self) -> None:
        queued = [job for job in self.in_state({JobState.QUEUED}).values() if not job.waits]
        order = sorted(queued, key=lambda job: (-job.priority, job.place))
        for job in order[: max(0, SLOTS - len(self.in_state(ACTIVE)))]:
            job.state = JobState.PREPARING

    @precondition(lambda self: self.in_state(ACTIVE))
    @rule(which=WHICH)
    def trainer_speaks(self, which: int) -> None:
        job_id, job = self.pick_active(which)
        self.runner.say(self.runs, job_id, "running")
        self.server.look()
        if job.state is JobState.PREPARING:
            job.state = JobState.RUNNING
        self.start_queued()

    @precondition(lambda self: self.in_state(ACTIVE))
    @rule(
        which=WHICH,
        verdict=st.sampled_from(["succeeded", "failed", "away", "cancelled", "running", "running"]),
        outcome=st.sampled_from([Exited(0), Exited(1), Exited(-9), Lost(False), Lost(True)]),
    )
    def trainer_ends(
        self, which: int, verdict: Verdict | Literal["away"], outcome: Exited | Lost
    ) -> None:
        """The trainer writes `verdict` and ends; "away": it failed because its teacher was away."""
        job_id, job = self.pick_active(which)
        code = "UNAVAILABLE" if verdict == "away" else ""
        self.runner.say(self.runs, job_id, "failed" if verdict == "away" else verdict, code=code)
        self.runner.end(job_id, outcome)
        self.server.look()
        rebooted = outcome == Lost(True)
        if verdict == "succeeded":
            job.state = JobState.SUCCEEDED
        elif verdict == "failed":
            job.state = JobState.FAILED
        elif job.state is JobState.CANCELLING:
            job.state = JobState.CANCELLED
        elif job.retries + (costs := verdict == "running" and not rebooted) > RETRIES:
            job.state = JobState.FAILED
        else:
            job.state, job.attempt = JobState.QUEUED, job.attempt + 1
            job.retries += costs
            job.waits = job.was_away = verdict == "away"
        self.start_queued()

    @precondition(lambda self: self.in_state(ACTIVE))
    @rule(times=st.integers(1, 4))
    def trainer_dies_again_and_again(self, times: int) -> None:
        """The trainer of the job that started first."""
        for _ in range(times):
            if self.in_state(ACTIVE):
                self.trainer_ends(0, "running", Exited(-9))
                self.everything_is_as_the_model_says()

    @rule()
    def server_dies_and_returns(self) -> None:
        self.server.close()
        self.server.start()
        for job in self.in_state({JobState.QUEUED}).values():
            job.waits = job.was_away

    @invariant()
    def everything_is_as_the_model_says(self) -> None:
        stored_states = {
            job.id: (job.state, job.attempt) for job in self.server.store.page(limit=100)
        }
        assert stored_states == {
            job_id: (job.state, job.attempt) for job_id, job in self.models.items()
        }
        assert {job_id for job_id, _ in self.runner.alive} == set(self.in_state(ACTIVE))
        ended_jobs = self.in_state(TERMINAL)
        assert all((self.server.store.job(job_id).ended_at > 0) for job_id in ended_jobs)


TestJobs = Jobs.TestCase
TestJobs.settings = settings(
    max_examples=60 if REPEATS >= 20 else 15,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)

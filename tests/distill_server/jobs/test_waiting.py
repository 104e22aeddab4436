"""Failures that are not the job's fault cost no retry: the job waits and continues by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from clients.config.kinds import AnyJob
from clients.config.on_policy import OnPolicyJob
from clients.jobs.job import Job, JobState
from clients.preflight.disk import check_space
from clients.runs.directory import RunDirectory, Status
from clients.teacher.client import TeacherNotReady
from distill_server.jobs import waiting
from distill_server.runners.interface import Exited, Lost
from distill_server.scheduler import Policy
from protos.errors import Unavailable, WrongState
from tests.distill_server.conftest import job_config
from tests.distill_server.jobs.preflight_site import job as job_values
from tests.distill_server.jobs.preflight_site import write_student
from tests.distill_server.scripted_runner import SmallServer, small_server

FIELD = "teacher.address"
REASON = "teacher.address: the teacher has not answered for 60 s; start the teacher again"
HOUR = 3600.0


class Teacher:
    """A scripted preflight check of a teacher."""

    def __init__(self) -> None:
        self.is_away = self.is_wrong = False
        self.stage = ""
        self.free_bytes: int | None = None
        self.checks = 0

    async def __call__(self, config: AnyJob, run: Path) -> None:
        self.checks += 1
        if self.stage:
            raise TeacherNotReady(f"it is loading ({self.stage})", field="teacher.address")
        if self.is_away:
            raise Unavailable("no teacher answers at here:1", field="teacher.address")
        if self.is_wrong:
            raise WrongState("another tokenizer", field="student.model")
        if self.free_bytes is not None:
            with patch("shutil.disk_usage", return_value=Mock(free=self.free_bytes)):
                check_space(config, run)


class Site:
    """A server with a scripted clock and one teacher."""

    def __init__(self, server: SmallServer, teacher: Teacher, now: list[float]) -> None:
        self.server, self.teacher, self.now = server, teacher, now

    def submit(self, name: str = "test") -> str:
        config = job_config(name).model_dump_json()
        return self.server.control.submit(config, "", "").id

    def job(self, job_id: str) -> Job:
        return self.server.store.job(job_id)

    def advance(self, seconds: float) -> None:
        self.now[0] += seconds
        self.server.look()

    def make_steps(self, job_id: str, *steps: int) -> None:
        run = RunDirectory(self.server.runs / job_id)
        attempt = self.job(job_id).attempt
        with run.metrics.open("a") as file:
            for step in steps:
                file.write(json.dumps({"attempt": attempt, "step": step, "loss": 1.0}) + "\n")

    def end_attempt(
        self, job_id: str, outcome: Exited | Lost, code: str = "", step: int = 1, field: str = FIELD
    ) -> Job:
        attempt = self.job(job_id).attempt
        if code:
            status = Status(attempt, "failed", "training", step, 5, REASON, code, field)
            RunDirectory(self.server.runs / job_id).write_status(status)
        self.server.runner.end(job_id, outcome)
        self.server.look()
        return self.job(job_id)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    now, teacher = [1_000_000.0], Teacher()
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])  # type: ignore[attr-defined]
    with small_server(tmp_path, Policy(retries=1, give_up_after=HOUR), teacher) as server:
        server.store._now = lambda: now[0]
        yield Site(server, teacher, now)


def test_a_teacher_that_is_away_fails_no_job_and_holds_no_slot(site: Site) -> None:
    first_id, second_id = site.submit(), site.submit()
    site.server.look()
    site.teacher.is_away = True
    for job_id in (first_id, second_id):  # the slot goes to the second at once
        job = site.end_attempt(job_id, Exited(4), "UNAVAILABLE")
        assert (job.state, job.attempt, job.reason) == (JobState.QUEUED, 2, REASON)
        assert re.fullmatch(
            r"WAITING teacher\.address: no answer since \d\d:\d\d UTC; next try in 5 s", job.phase
        )
    assert site.server.runner.alive == {}
    tries = []
    for _ in range(100):
        checks_before = site.teacher.checks
        site.advance(1)
        if site.teacher.checks > checks_before:
            tries.append(site.job(first_id).phase.rsplit("; ")[1])
    assert tries == [f"next try in {n} s" for n in (10, 20, 30, 30, 30)]
    assert re.fullmatch(
        r"WAITING teacher\.address: no teacher answers at here:1 since \d\d:\d\d UTC; next try in"
        r" 30 s",
        site.job(first_id).phase,
    )
    site.teacher.is_away = False
    site.advance(30)
    assert [key[0] for key in site.server.runner.alive] == [first_id]  # it kept its place
    assert site.server.store.attempt(site.job(first_id)).retries == 0


def test_a_new_job_waits_for_its_teacher(site: Site) -> None:
    """It loads for longer than the patience of 60 s; its stage is the reason; then it starts."""
    site.teacher.stage = "reading its weights: 40%"
    job = site.server.submit_checked(job_config("test"))
    assert (job.state, job.attempt) == (JobState.QUEUED, 1)
    phase_pattern = r"WAITING teacher\.address: it is loading \(reading its weights: 40%\) since "
    assert re.match(phase_pattern, job.phase)
    for percent in range(41, 99):
        site.teacher.stage = f"reading its weights: {percent}%"
        site.advance(5)
        assert f": {percent}%) since" in site.job(job.id).phase
        assert site.job(job.id).phase.endswith("next try in 5 s")
    site.teacher.stage = ""
    site.advance(5)
    assert list(site.server.runner.alive) == [(job.id, 1)]


def test_a_new_job_waits_for_a_teacher_that_is_away(site: Site) -> None:
    """Longer than the patience of an attempt: nothing is lost when a teacher restarts slowly."""
    site.teacher.is_away = True
    job = site.server.submit_checked(job_config("test"))
    site.advance(90)
    assert site.job(job.id).state is JobState.QUEUED
    assert "WAITING teacher.address: no teacher answers at here:1" in site.job(job.id).phase
    site.teacher.is_away = False
    site.advance(360)
    assert site.job(job.id).state is not JobState.QUEUED


def test_the_time_in_the_queue_is_no_wait_for_a_teacher(site: Site) -> None:
    """The teacher of a new job loaded for a moment; then the job waited for a slot for hours."""
    running_id = site.submit()
    site.server.look()
    site.teacher.stage = "reading its weights"
    job_id = site.server.submit_checked(job_config("test")).id
    site.teacher.stage = ""
    for _ in range(8):
        site.advance(HOUR / 2)
    site.end_attempt(running_id, Exited(1))
    assert site.server.store.attempt(site.job(job_id)).waiting_since == 1_000_000.0
    site.teacher.is_away = True
    site.server.cancel(running_id, now=True)
    site.advance(400)
    assert (job_id, 1) in site.server.runner.alive
    job = site.end_attempt(job_id, Exited(4), "UNAVAILABLE")
    assert (job.state, job.attempt) == (JobState.QUEUED, 2)
    site.advance(HOUR + 60)
    assert site.job(job_id).state is JobState.FAILED


def test_a_full_disk_after_the_job_is_stored(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is queued with its run directory, and waits; only its phase is missing."""
    site.teacher.is_away = True

    def fail(*_: Any) -> Job:
        raise Unavailable("the database cannot be written")

    with monkeypatch.context() as patch:
        patch.setattr(site.server.store, "change", fail)
        job = site.server.submit_checked(job_config("test"))
    assert site.job(job.id).state is JobState.QUEUED
    assert (site.server.runs / job.id / "job.json").exists()
    site.advance(30)
    assert "WAITING teacher.address" in site.job(job.id).phase


def test_the_wait_outlives_the_server(site: Site) -> None:
    job_id = site.submit()
    site.server.look()
    site.teacher.is_away = True
    site.end_attempt(job_id, Exited(4), "DEADLINE_EXCEEDED")
    since = site.server.store.attempt(site.job(job_id)).waiting_since
    assert since == site.now[0]
    site.server.close()
    site.server.start()
    site.server.store._now = lambda: site.now[0]
    for _ in range(20):
        site.advance(1)
    assert site.server.runner.alive == {}
    assert site.server.store.attempt(site.job(job_id)).waiting_since == since
    site.teacher.is_away = False
    site.advance(30)
    assert list(site.server.runner.alive) == [(job_id, 2)]


def test_a_wait_ends_after_the_bound(site: Site) -> None:
    job_id = site.submit()
    site.server.look()
    site.teacher.is_away = True
    site.end_attempt(job_id, Exited(4), "UNAVAILABLE")
    site.advance(HOUR - 1)
    assert site.job(job_id).state is JobState.QUEUED
    site.advance(31)
    job = site.job(job_id)
    assert job.state is JobState.FAILED
    assert job.reason.startswith("teacher.address: no teacher answers at here:1; given up")
    assert "no progress since 1970-01-12 13:46 UTC (--give-up-after)" in job.reason


def test_the_bound_holds_over_attempts_without_progress(site: Site) -> None:
    """Each preflight passes and each trainer fails: the pauses grow until the job fails."""
    job_id = site.submit()
    site.server.look()
    site.make_steps(job_id, 1, 2)
    job = site.end_attempt(job_id, Exited(4), "RESOURCE_EXHAUSTED")
    while job.state is JobState.QUEUED:
        while not site.server.runner.alive:
            site.advance(5)
        site.advance(HOUR / 4)
        job = site.end_attempt(job_id, Exited(4), "RESOURCE_EXHAUSTED")
    assert (job.state, job.attempt) == (JobState.FAILED, 5)


def test_progress_begins_a_new_wait(site: Site) -> None:
    job_id = site.submit()
    site.server.look()
    for step in range(1, 8):
        site.make_steps(job_id, step)
        site.advance(HOUR / 2)
        job = site.end_attempt(job_id, Exited(4), "UNAVAILABLE", step)
        assert "next try in 5 s" in job.phase
        site.advance(5)
    assert list(site.server.runner.alive) == [(job_id, 8)]


def test_what_is_wrong_with_the_job_is_told_by_its_trainer(site: Site) -> None:
    job_id = site.submit()
    site.server.look()
    site.teacher.is_wrong = True
    site.end_attempt(job_id, Exited(4), "UNAVAILABLE")
    site.advance(5)
    assert list(site.server.runner.alive) == [(job_id, 2)]
    assert site.end_attempt(job_id, Exited(6), "WrongState").state is JobState.FAILED


@pytest.mark.parametrize(("cause", "waits"), [("disk", True), ("teacher.address", False)])
def test_a_job_waits_for_a_disk_that_was_full(
    cause: str, waits: bool, site: Site, tmp_path: Path
) -> None:
    """The disk must have space for the job, not only for the first bytes. A job that did not wait
    for the disk ends with the refusal of its trainer.
    """
    write_student(tmp_path / "student", rows=1000)
    config = OnPolicyJob.model_validate(
        job_values(tmp_path, "localhost:1", student__model=str(tmp_path / "student"))
    )
    job_id = site.server.control.submit(config.model_dump_json(), "", "").id
    site.server.look()
    site.teacher.free_bytes = 4 * 1000 * 1000
    site.end_attempt(job_id, Exited(4), "UNAVAILABLE", field=cause)
    for _ in range(20):
        site.advance(30)
    assert (list(site.server.runner.alive) == []) is waits
    if waits:
        assert re.match("WAITING disk: the job needs .* only 0.004 GB", site.job(job_id).phase)
        site.teacher.free_bytes = 4 * 1000 * 1000 * 1000
        site.advance(30)
    assert list(site.server.runner.alive) == [(job_id, 2)]


def test_a_waiting_job_is_cancelled_and_resumed_without_a_wait(site: Site) -> None:
    job_id = site.submit()
    site.server.look()
    site.teacher.is_away = True
    site.end_attempt(job_id, Exited(4), "UNAVAILABLE")
    site.server.cancel(job_id, now=False)
    site.advance(60)
    assert site.job(job_id).state is JobState.CANCELLED
    site.server.control.resume(job_id, max_steps=0, from_step=0)
    site.server.look()
    assert list(site.server.runner.alive) == [(job_id, 3)]


def test_progress_resets_the_retries_and_a_crash_at_one_step_does_not(site: Site) -> None:
    job_id = site.submit()
    site.server.look()
    for steps in ([1, 2], [2, 3], [3, 4], [4, 5]):
        site.make_steps(job_id, *steps)
        assert site.end_attempt(job_id, Exited(-9)).state is JobState.QUEUED
        site.advance(400)
    site.make_steps(job_id, 4, 5)  # no new step
    assert site.end_attempt(job_id, Exited(-9)).state is JobState.FAILED


def test_lost_attempts_of_earlier_servers_cost_nothing_but_have_a_bound(site: Site) -> None:
    job_id = site.submit()
    site.server.look()
    for _ in range(3):
        assert site.end_attempt(job_id, Lost(blameless=True)).state is JobState.QUEUED
        site.advance(HOUR / 3)
    job = site.end_attempt(job_id, Lost(blameless=True))
    while job.state is JobState.QUEUED:
        site.advance(HOUR / 3)
        job = site.end_attempt(job_id, Lost(blameless=True))
    assert job.state is JobState.FAILED
    assert "given up: no progress since" in job.reason


def test_the_queue_is_as_old_as_the_last_time_it_was_entered(site: Site) -> None:
    job_id = site.submit()
    site.server.cancel(job_id, now=False)
    site.now[0] += 1000
    assert site.server.store.oldest_wait() == 0
    site.server.control.resume(job_id, max_steps=0, from_step=0)
    site.now[0] += 7
    assert site.server.store.oldest_wait() == 7

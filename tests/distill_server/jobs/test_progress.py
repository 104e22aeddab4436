from __future__ import annotations

import json
from pathlib import Path

import pytest

from clients.jobs.job import Job, JobState
from clients.runs.directory import RunDirectory, Status
from clients.runs.metrics_file import MetricsTail, Point
from distill_server.jobs.observation import progress_changes, status_of
from distill_server.jobs.store import Change
from distill_server.jobs.verdict import DeadAttempt, JobEnded, verdict_of
from distill_server.runners.interface import Exited, Lost
from protos.errors import DistillError, Overloaded, TimedOut, Unavailable


def lines(attempt: int, *steps: int) -> str:
    return "".join(json.dumps({"attempt": attempt, "step": s, "loss": 1.0}) + "\n" for s in steps)


def steps_of(tail: MetricsTail) -> list[int]:
    return [point.step for point in tail.read()]


def test_tail_follows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path, attempt=1, seen_step=-1)
    assert tail.read() == []
    path.write_text(lines(1, 0, 1) + '{"attempt": 1, "st')
    assert steps_of(tail) == [0, 1]
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert tail.read() == [Point(2, {})]
    assert tail.read() == []


def test_tail_of_a_rewritten_file_repeats_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, 1, 2, 3, 4))
    tail = MetricsTail(path, attempt=2, seen_step=-1)
    assert steps_of(tail) == []
    shorter = tmp_path / "new"
    shorter.write_text(lines(1, 1, 2))
    shorter.replace(path)
    assert steps_of(tail) == []
    with path.open("a") as file:
        file.write(lines(2, 3, 4, 5))
    assert steps_of(tail) == [3, 4, 5]
    path.write_text(lines(1, 1, 2) + lines(2, 3))
    assert steps_of(tail) == []


def test_tail_after_a_restart_of_the_server(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, *range(10)))
    assert steps_of(MetricsTail(path, attempt=1, seen_step=7)) == [8, 9]


def test_tail_reads_all_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, *range(60_000)) + '{"half')
    tail = MetricsTail(path, attempt=1, seen_step=-1)
    assert len(tail.read_all()) == 60_000


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "7",
        "{}",
        '{"attempt": 1, "step": 1e999}',
        '{"attempt": 1}',
        '{"attempt": 1, "step": []}',
    ],
)
def test_nonsense_is_passed_over(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line + "\n" + lines(1, 4))
    assert steps_of(MetricsTail(path, attempt=1, seen_step=-1)) == [4]


def test_only_finite_numbers_are_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    values = {"attempt": 1, "step": 1, "loss": float("nan"), "note": "x", "lr": 1, "big": 1e400}
    path.write_text(json.dumps(values) + "\n")
    tail = MetricsTail(path, attempt=1, seen_step=-1)
    assert tail.read() == [Point(1, {"lr": 1.0})]


def test_status_of_another_attempt_is_no_word(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert status_of(run, 1) is None
    run.write_status(Status(1, "cancelled"))
    assert status_of(run, 1) == Status(1, "cancelled")
    assert status_of(run, 2) is None
    for nonsense in ("{", "[]", '{"unknown": 1}', '{"attempt": 1, "verdict": "odd"}', "\0"):
        (tmp_path / "status.json").write_text(nonsense)
        assert status_of(run, 1) is None


@pytest.mark.parametrize(
    ("error", "code"),
    [("Unavailable", "UNAVAILABLE"), ("InvalidInput", "INVALID_ARGUMENT"), ("", ""), ([], None)],
)
def test_status_of_a_trainer_of_an_earlier_version(
    tmp_path: Path, error: object, code: str | None
) -> None:
    """A server of this version adopts trainers that wrote the class of an error as `error`."""
    record = {"attempt": 1, "verdict": "failed", "reason": "teacher.address: gone", "error": error}
    (tmp_path / "status.json").write_text(json.dumps(record))
    status = status_of(RunDirectory(tmp_path), 1)
    assert (None if status is None else status.code) == code
    if status is not None:
        verdict = verdict_of(JobState.RUNNING, 1, status, Exited(4))
        assert isinstance(verdict, DeadAttempt) == (code == "UNAVAILABLE")


def job_in(state: JobState, phase: str) -> Job:
    return Job("a", "a", "on_policy", state, "", phase, 1, 0, 5, 1.0, 1.0, 0.0, 2)


def test_changes_of_a_look() -> None:
    preparing = job_in(JobState.PREPARING, "")
    assert progress_changes(preparing, None, []) == []
    loading = Status(1, "running", phase="loading student")
    assert progress_changes(preparing, loading, []) == [
        Change(JobState.RUNNING, phase="loading student")
    ]
    running = job_in(JobState.RUNNING, "training")
    assert progress_changes(running, Status(1, "running", phase="training"), []) == []
    assert progress_changes(
        running, Status(1, "running", phase="saving"), [Point(4, {"x": 1.0})]
    ) == [
        Change(phase="saving"),
        Change(step=4, metrics={"x": 1.0}),
    ]


RUNNING, CANCELLING = JobState.RUNNING, JobState.CANCELLING


@pytest.mark.parametrize(
    ("state", "verdict", "outcome", "expected"),
    [
        (RUNNING, "succeeded", Exited(0), JobEnded(JobState.SUCCEEDED, "said so")),
        # The verdict counts, not the exit code of the interpreter's shutdown.
        (RUNNING, "succeeded", Exited(-11), JobEnded(JobState.SUCCEEDED, "said so")),
        (RUNNING, "failed", Exited(1), JobEnded(JobState.FAILED, "said so")),
        # Not requested: a preemption, or a machine that is drained.
        (RUNNING, "cancelled", Exited(0), DeadAttempt("said so", blameless=True)),
        (
            RUNNING,
            "running",
            Exited(-9),
            DeadAttempt("the trainer was killed by signal 9 at step 37", False),
        ),
        # Stopped from outside before its handler was set: it costs no retry.
        (RUNNING, None, Exited(-15), DeadAttempt("the trainer was stopped by SIGTERM", True)),
        (
            RUNNING,
            None,
            Exited(3),
            DeadAttempt("the trainer exited with code 3 without a final status at step 37", False),
        ),
        (
            RUNNING,
            None,
            Lost(False),
            DeadAttempt("the trainer and its supervisor process disappeared at step 37", False),
        ),
        (CANCELLING, "succeeded", Exited(0), JobEnded(JobState.SUCCEEDED, "said so")),
        (CANCELLING, "failed", Exited(1), JobEnded(JobState.FAILED, "said so")),
        (CANCELLING, "cancelled", Exited(0), JobEnded(JobState.CANCELLED, "said so")),
        (
            CANCELLING,
            "running",
            Exited(-9),
            JobEnded(
                JobState.CANCELLED, "cancelled; the trainer was killed by signal 9 at step 37"
            ),
        ),
    ],
)
def test_verdicts(
    state: JobState, verdict: str | None, outcome: Exited | Lost, expected: object
) -> None:
    reason = "" if verdict == "running" else "said so"
    status = Status(1, verdict, reason=reason) if verdict else None  # type: ignore[arg-type]
    assert verdict_of(state, 37, status, outcome) == expected


def test_an_attempt_that_died_may_say_why() -> None:
    status = Status(1, "running", reason="another process of the trainer has died: Read error")
    assert verdict_of(RUNNING, 37, status, Exited(1)) == DeadAttempt(status.reason, blameless=False)


def test_a_reason_names_the_file_of_the_user() -> None:
    path = f"/srv/runs/.uploads/{'0a' * 32}"
    reason = f"the prompt of row 3 of {path}/train.jsonl has no tokens; see '{path}/m/x.txt'"
    status = Status(1, "failed", reason=reason, code="INVALID_ARGUMENT", field="data.path")
    assert verdict_of(RUNNING, 1, status, Exited(2)) == JobEnded(
        JobState.FAILED, "the prompt of row 3 of train.jsonl has no tokens; see 'm/x.txt'"
    )


@pytest.mark.parametrize("error", [Unavailable, Overloaded, TimedOut])
def test_what_the_job_runs_on_is_not_its_fault(error: type[DistillError]) -> None:
    reason = "teachers.math-2: the teacher has not answered for 60 s; start it again"
    status = Status(1, "failed", reason=reason, code=error.code, field="teachers.math-2")
    assert verdict_of(RUNNING, 37, status, Exited(4)) == DeadAttempt(
        reason, True, "teachers.math-2"
    )
    assert verdict_of(CANCELLING, 37, status, Exited(4)) == JobEnded(
        JobState.CANCELLED, f"cancelled; {reason}"
    )
    plain = Status(1, "failed", reason="no answer: none", code=error.code)
    assert verdict_of(RUNNING, 37, plain, Exited(4)) == DeadAttempt(
        "no answer: none", True, "a service that the job needs"
    )


def test_a_shutdown_of_the_machine_costs_no_retry_and_cancels_nothing() -> None:
    rebooted = Lost(blameless=True)
    verdict = verdict_of(RUNNING, 37, Status(1, "cancelled"), rebooted)
    assert isinstance(verdict, DeadAttempt)
    assert verdict.blameless
    assert verdict_of(CANCELLING, 37, Status(1, "cancelled"), rebooted) == JobEnded(
        JobState.CANCELLED, "cancelled on request"
    )

"""Decides how a job continues after an attempt has ended. Pure: reads no files and no clocks."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from clients.jobs.job import JobState
from clients.runs.directory import Status
from distill_server.runners.interface import CancelledInCluster, Exited, Lost
from distill_server.runners.machine import ONE_JOB, Machine
from distill_server.uploads import name_uploads
from protos.errors import ExitCode, is_infrastructure


@dataclass(frozen=True)
class Policy:
    """Limits and times of the scheduler. Times are in seconds.

    - retries: automatic retries after the death of a trainer, counted from the last new step.
    - backoff: pause before the first retry; doubled for each further retry, up to
      `longest_backoff`.
    - wait: pause before the preflight of a waiting job is repeated; doubled up to `longest_wait`.
    - give_up_after: time without a new step after which a waiting job is FAILED.
    - linger: time from the end of a teacher's last job to the end of the teacher.
    - lease: time without a server and without trainers after which a teacher ends by itself.
    - cancel_grace: time for the last checkpoint of a cancelled job. The trainer is killed after
      this time plus twice the duration of the job's last step.
    - cancel_now_grace: time from a cancel without a checkpoint to the kill of the trainer.
    - poll_every: pause between two polls.
    """

    machine: Machine = ONE_JOB
    max_queued: int = 10_000
    retries: int = 3
    backoff: float = 10.0
    longest_backoff: float = 360.0
    cancel_grace: float = 60.0
    cancel_now_grace: float = 5.0
    poll_every: float = 0.2
    wait: float = 5.0
    longest_wait: float = 30.0
    give_up_after: float = 24 * 3600.0
    linger: float = 60.0
    lease: float = 600.0


@dataclass(frozen=True)
class JobEnded:
    """The job has ended in `state`, which is terminal."""

    state: JobState
    reason: str = ""


@dataclass(frozen=True)
class DeadAttempt:
    """The attempt ended without a result; the scheduler may start another attempt of the job.

    - blameless: True if the job is not the cause, but a reboot, a preemption or an unreachable
      teacher is. The next attempt then is not counted as a retry.
    - waits_for: the unreachable service, usually named by a key of the job such as
      `teacher.address`. The job waits until the service answers. "" if there is no such service.
    """

    reason: str
    blameless: bool
    waits_for: str = ""


def verdict_of(
    state: JobState,
    step: int,
    status: Status | None,
    outcome: Exited | Lost | CancelledInCluster,
    stop: str = "",
) -> JobEnded | DeadAttempt:
    """Return how a job in `state` continues after an attempt has ended.

    The decision depends on `state`, on the trainer's last status and on the outcome of the attempt.
    `step` and `stop` (the request in control.json) change only the text of the reason.
    """
    is_blameless_loss = isinstance(outcome, Lost) and outcome.blameless
    is_cancelling = state is JobState.CANCELLING
    verdict = status.verdict if status is not None else "running"
    reason = name_uploads(status.reason) if status is not None else ""
    if verdict == "succeeded":
        return JobEnded(JobState.SUCCEEDED, reason)
    if isinstance(outcome, CancelledInCluster) and not is_cancelling:
        return JobEnded(JobState.CANCELLED, outcome.reason)
    if verdict == "cancelled" and is_cancelling:
        return JobEnded(JobState.CANCELLED, reason or "cancelled on request")
    if status is not None and verdict == "failed":
        if not is_infrastructure(status.code):
            return JobEnded(JobState.FAILED, reason or "the trainer gave no reason")
        waits_for = status.field or "a service that the job needs"
        attempt_died = DeadAttempt(reason, blameless=True, waits_for=waits_for)
    elif verdict == "cancelled" and not is_blameless_loss:
        # No user requested the cancel: the server stopped (--on-stop=checkpoint), the machine is
        # drained, or the attempt was preempted.
        cause = (
            "stopped for a restart of the server" if stop else "the trainer was stopped by SIGTERM"
        )
        attempt_died = DeadAttempt(reason or cause, blameless=True)
    elif outcome == Exited(-signal.SIGTERM):
        # SIGTERM came from outside the server, before the trainer installed its handler.
        attempt_died = DeadAttempt("the trainer was stopped by SIGTERM", blameless=True)
    elif outcome == Exited(ExitCode.UNREACHABLE):
        # The trainer could not write its verdict, most likely because the disk is full.
        reason = "the trainer could not write its final status; read its log"
        attempt_died = DeadAttempt(reason, blameless=True, waits_for="disk")
    else:
        attempt_died = DeadAttempt(
            reason or _describe_end(outcome, step), blameless=is_blameless_loss
        )
    return (
        JobEnded(JobState.CANCELLED, f"cancelled; {attempt_died.reason}")
        if is_cancelling
        else attempt_died
    )


def _describe_end(outcome: Exited | Lost | CancelledInCluster, step: int) -> str:
    match outcome:
        case CancelledInCluster(reason=reason):
            return reason
        case Lost(reason=reason) if reason:
            return reason
        case Lost(blameless=True):
            cause = (
                "the machine or its container was restarted, or the start of the trainer was"
                " interrupted,"
            )
        case Lost():
            cause = "the trainer and its supervisor process disappeared"
        case Exited(code=code) if code < 0:
            cause = f"the trainer was killed by signal {-code}"
        case Exited(code=code):
            cause = f"the trainer exited with code {code} without a final status"
    return f"{cause} at step {step}"

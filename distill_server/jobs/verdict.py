"""What an attempt that is over makes of its job. Pure: no files, no clocks."""

from __future__ import annotations

from dataclasses import dataclass

from clients.jobs.job import JobState
from clients.runs.directory import Status
from distill_server.runners.interface import Exited, Lost


@dataclass(frozen=True)
class Ended:
    """The job is over."""

    state: JobState
    reason: str = ""


@dataclass(frozen=True)
class Died:
    """The trainer died without a word.

    `blameless`: through no fault of the job, so that it costs no retry.
    """

    reason: str
    blameless: bool


def verdict_of(
    state: JobState, step: int, status: Status | None, outcome: Exited | Lost
) -> Ended | Died:
    """Judge an attempt of a job in `state` by its trainer's last words and its end."""
    rebooted = isinstance(outcome, Lost) and outcome.blameless
    cancelling = state is JobState.CANCELLING
    verdict = status.verdict if status is not None else "running"
    reason = status.reason if status is not None else ""
    if verdict == "succeeded":
        return Ended(JobState.SUCCEEDED)
    if verdict == "failed":
        return Ended(JobState.FAILED, reason or "the trainer gave no reason")
    # A machine that shuts down tells every process to stop; its owner did not ask for that.
    if verdict == "cancelled" and (cancelling or not rebooted):
        default = (
            "cancelled on request" if cancelling else "the trainer was told to stop by SIGTERM"
        )
        return Ended(JobState.CANCELLED, reason or default)
    death = f"{_death(outcome)} at step {step}"
    if cancelling:
        return Ended(JobState.CANCELLED, f"cancelled; {death}")
    return Died(death, blameless=rebooted)


def _death(outcome: Exited | Lost) -> str:
    match outcome:
        case Lost(blameless=True):
            return "the trainer's machine was restarted, or its start was interrupted,"
        case Lost():
            return "the trainer and its watcher disappeared"
        case Exited(code=code) if code < 0:
            return f"the trainer was killed by signal {-code}"
        case Exited(code=code):
            return f"the trainer exited with code {code} without a verdict"

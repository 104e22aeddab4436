"""Decides how a job continues after an attempt has ended. Pure: reads no files and no clocks."""

from __future__ import annotations

from dataclasses import dataclass

from clients.jobs.job import JobState
from clients.runs.directory import Status
from distill_server.runners.interface import Exited, Lost


@dataclass(frozen=True)
class Ended:
    """The job has ended in `state`, which is terminal."""

    state: JobState
    reason: str = ""


@dataclass(frozen=True)
class Died:
    """The trainer ended without writing a verdict, so the job is a candidate for a retry.

    `blameless`: the cause was not the job (a reboot, for example), so the retry is not counted.
    """

    reason: str
    blameless: bool


def verdict_of(
    state: JobState, step: int, status: Status | None, outcome: Exited | Lost
) -> Ended | Died:
    """Judge an ended attempt of a job in `state` by the trainer's last status and its exit.

    `step` appears in the reason only.
    """
    rebooted = isinstance(outcome, Lost) and outcome.blameless
    cancelling = state is JobState.CANCELLING
    verdict = status.verdict if status is not None else "running"
    reason = status.reason if status is not None else ""
    if verdict == "succeeded":
        return Ended(JobState.SUCCEEDED)
    if verdict == "failed":
        return Ended(JobState.FAILED, reason or "the trainer gave no reason")
    # A machine that shuts down sends SIGTERM to all processes; that is no request to cancel.
    if verdict == "cancelled" and (cancelling or not rebooted):
        default = "cancelled on request" if cancelling else "the trainer was stopped by SIGTERM"
        return Ended(JobState.CANCELLED, reason or default)
    death = f"{_death(outcome)} at step {step}"
    if cancelling:
        return Ended(JobState.CANCELLED, f"cancelled; {death}")
    return Died(death, blameless=rebooted)


def _death(outcome: Exited | Lost) -> str:
    match outcome:
        case Lost(blameless=True):
            return "the machine was restarted, or the start of the trainer was interrupted,"
        case Lost():
            return "the trainer and its supervisor process disappeared"
        case Exited(code=code) if code < 0:
            return f"the trainer was killed by signal {-code}"
        case Exited(code=code):
            return f"the trainer exited with code {code} without a verdict"

"""Decides how a job continues after an attempt has ended. Pure: reads no files and no clocks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clients.jobs.job import JobState
from clients.runs.directory import Status
from distill_server.runners.interface import CancelledInCluster, Exited, Lost
from protos.errors import ExitCode, is_infrastructure

_FIELD = re.compile(r"([a-z_][\w.-]*): ")


@dataclass(frozen=True)
class Ended:
    """The job has ended in `state`, which is terminal."""

    state: JobState
    reason: str = ""


@dataclass(frozen=True)
class Died:
    """The attempt ended without a result, so the job is a candidate for another attempt.

    `blameless`: the cause was not the job (a reboot, a preemption, a teacher that is away), so the
    next attempt costs no retry. `waits_for`, if any, names what was away, usually a key of the job
    such as `teacher.address`: the job waits until it is back.
    """

    reason: str
    blameless: bool
    waits_for: str = ""


def verdict_of(
    state: JobState, step: int, status: Status | None, outcome: Exited | Lost | CancelledInCluster
) -> Ended | Died:
    """Judge an ended attempt of a job in `state` by the trainer's last status and its exit.

    `step` appears in the reason only.
    """
    lost = isinstance(outcome, Lost) and outcome.blameless
    cancelling = state is JobState.CANCELLING
    verdict = status.verdict if status is not None else "running"
    reason = status.reason if status is not None else ""
    if verdict == "succeeded":
        return Ended(JobState.SUCCEEDED)
    if isinstance(outcome, CancelledInCluster) and not cancelling:
        return Ended(JobState.CANCELLED, outcome.reason)
    if verdict == "cancelled" and cancelling:
        return Ended(JobState.CANCELLED, reason or "cancelled on request")
    if status is not None and verdict == "failed":
        if not is_infrastructure(status.error):
            return Ended(JobState.FAILED, reason or "the trainer gave no reason")
        died = Died(reason, blameless=True, waits_for=_subject(reason))
    elif verdict == "cancelled" and not lost:
        # Nobody asked for it: the machine is drained, or the attempt was preempted.
        died = Died(reason or "the trainer was stopped by SIGTERM", blameless=True)
    elif outcome == Exited(ExitCode.UNREACHABLE):
        # The trainer could not write its verdict, most likely because the disk is full.
        reason = "the trainer could not write its verdict; see its log"
        died = Died(reason, blameless=True, waits_for="disk")
    else:
        died = Died(reason or _death(outcome, step), blameless=lost)
    return Ended(JobState.CANCELLED, f"cancelled; {died.reason}") if cancelling else died


def _subject(reason: str) -> str:
    """Return the field that a message of a DistillError names, or a general word."""
    found = _FIELD.match(reason)
    return found[1] if found else "a service that the job needs"


def _death(outcome: Exited | Lost | CancelledInCluster, step: int) -> str:
    match outcome:
        case CancelledInCluster(reason=reason):
            return reason
        case Lost(reason=reason) if reason:
            return reason
        case Lost(blameless=True):
            how = (
                "the machine or its container was restarted, or the start of the trainer was"
                " interrupted,"
            )
        case Lost():
            how = "the trainer and its supervisor process disappeared"
        case Exited(code=code) if code < 0:
            how = f"the trainer was killed by signal {-code}"
        case Exited(code=code):
            how = f"the trainer exited with code {code} without a verdict"
    return f"{how} at step {step}"

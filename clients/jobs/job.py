"""What a job is to the people who own it: its states, and the values the client hands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class JobState(StrEnum):
    QUEUED = "QUEUED"
    PREPARING = "PREPARING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLING = "CANCELLING"
    CANCELLED = "CANCELLED"


TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})

# Every legal change of state; all 49 pairs are tested. Back to QUEUED: a resume, or a restarted
# server that found the attempt's processes gone.
TRANSITIONS: frozenset[tuple[JobState, JobState]] = frozenset(
    {
        (JobState.QUEUED, JobState.PREPARING),
        (JobState.QUEUED, JobState.CANCELLED),
        (JobState.PREPARING, JobState.RUNNING),
        (JobState.PREPARING, JobState.FAILED),
        (JobState.PREPARING, JobState.CANCELLING),
        (JobState.PREPARING, JobState.QUEUED),
        (JobState.RUNNING, JobState.SUCCEEDED),
        (JobState.RUNNING, JobState.FAILED),
        (JobState.RUNNING, JobState.CANCELLING),
        (JobState.RUNNING, JobState.QUEUED),
        (JobState.CANCELLING, JobState.CANCELLED),
        # It ended by itself before the wish to cancel reached it.
        (JobState.CANCELLING, JobState.SUCCEEDED),
        (JobState.CANCELLING, JobState.FAILED),
        (JobState.FAILED, JobState.QUEUED),
        (JobState.CANCELLED, JobState.QUEUED),
        # With more max_steps than it was done with.
        (JobState.SUCCEEDED, JobState.QUEUED),
    }
)


@dataclass(frozen=True)
class Job:
    """A job as the server knows it. Times are Unix seconds, 0 when it has not happened."""

    id: str
    name: str
    kind: str
    state: JobState
    reason: str
    phase: str
    attempt: int
    step: int
    max_steps: int
    created_at: float
    started_at: float
    ended_at: float
    last_seq: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    config_json: str = ""
    # Steps of those that are there, in order; as config_json, only of a job that was asked for.
    checkpoints: tuple[int, ...] = ()


@dataclass(frozen=True)
class JobEvent:
    """One change of a job. `seq` counts from 1 without gaps; only a step has `metrics`."""

    seq: int
    time: float
    state: JobState
    reason: str
    phase: str
    attempt: int
    step: int
    max_steps: int
    metrics: Mapping[str, float] = field(default_factory=dict)

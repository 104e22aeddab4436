"""The states of a job, and the values that DistillClient returns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any


class JobState(StrEnum):
    """The state of a job. `TERMINAL` and `TRANSITIONS` define the possible next states."""

    QUEUED = "QUEUED"
    PREPARING = "PREPARING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLING = "CANCELLING"
    CANCELLED = "CANCELLED"

    @classmethod
    def _missing_(cls, value: object) -> JobState | None:
        return UNKNOWN if value == "UNKNOWN" else None


# A newer server may have a state that this version does not know. UNKNOWN is no member of JobState:
# a server has no jobs in this state, and users cannot select it.
UNKNOWN: JobState = str.__new__(JobState, "UNKNOWN")
UNKNOWN._name_ = UNKNOWN._value_ = "UNKNOWN"


TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})

# Every legal change of state; the tests check all 49 pairs. A job returns to QUEUED when it is
# resumed, when its trainer died or was stopped by SIGTERM, and when its teacher is unreachable.
TRANSITIONS: frozenset[tuple[JobState, JobState]] = frozenset(
    {
        (JobState.QUEUED, JobState.PREPARING),
        (JobState.QUEUED, JobState.CANCELLED),
        # A service that the job waits for, such as a teacher, was unreachable for too long.
        (JobState.QUEUED, JobState.FAILED),
        (JobState.PREPARING, JobState.RUNNING),
        (JobState.PREPARING, JobState.FAILED),
        (JobState.PREPARING, JobState.CANCELLING),
        (JobState.PREPARING, JobState.QUEUED),
        (JobState.RUNNING, JobState.SUCCEEDED),
        (JobState.RUNNING, JobState.FAILED),
        (JobState.RUNNING, JobState.CANCELLING),
        (JobState.RUNNING, JobState.QUEUED),
        (JobState.CANCELLING, JobState.CANCELLED),
        # The job ended by itself before the request to cancel reached it.
        (JobState.CANCELLING, JobState.SUCCEEDED),
        (JobState.CANCELLING, JobState.FAILED),
        (JobState.FAILED, JobState.QUEUED),
        (JobState.CANCELLED, JobState.QUEUED),
        # A resume with a larger max_steps.
        (JobState.SUCCEEDED, JobState.QUEUED),
    }
)


@dataclass(frozen=True)
class Job:
    """A job as reported by the server. Times are Unix seconds, or 0 before the event has happened.

    - `kind`: the method
    - `attempt`: number of the attempt, from 1
    - `last_seq`: number of the newest event
    - `metrics`: the metrics of the newest step
    - `config_json`, `checkpoints`: the whole job as JSON, and the steps of the existing checkpoints
      in ascending order. Only DistillClient.get and `record_of_run` set these two.
    - `pinned`: the job is protected from removal
    - `owner`: owner of the token that submitted the job, or ""
    - `labels`: the labels in the job file
    - `dependencies`: ids of the jobs that must succeed before this job starts; only DistillClient
      sets them
    """

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
    checkpoints: tuple[int, ...] = ()
    pinned: bool = False
    owner: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    dependencies: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobEvent:
    """One change of a job: a new state, a new phase, or a step.

    - `seq`: number of the event, from 1. The server removes some old events of a long job, so
      numbers may be missing.
    - `time`: Unix seconds
    - `metrics`: the metrics of a step; empty for other events
    """

    seq: int
    time: float
    state: JobState
    reason: str
    phase: str
    attempt: int
    step: int
    max_steps: int
    metrics: Mapping[str, float] = field(default_factory=dict)


def facts_of(job: Job) -> dict[str, Any]:
    """Return a job as a JSON object, with times as texts (see `format_time`).

    `checkpoints` and `config` are missing if `job.config_json` is empty, as for jobs of a list.
    """
    record = asdict(job)
    config, checkpoints = record.pop("config_json"), record.pop("checkpoints")
    for name in ("created_at", "started_at", "ended_at"):
        record[name] = format_time(record[name])
    return (
        {**record, "checkpoints": checkpoints, "config": json.loads(config)} if config else record
    )


def format_time(moment: float) -> str | None:
    """Return a Unix time in ISO 8601, UTC, such as `2026-03-01T12:00:00.250Z`; None for 0."""
    if not moment:
        return None
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


@dataclass(frozen=True)
class StartedTeacher:
    """A teacher that a server runs for its jobs.

    - `state`: LOADING, READY, RESTING (the teacher died and will be restarted), STOPPING or FAILED
    - `reason`: why the teacher ended the last time
    - `address`: HOST:PORT on the server's machine; "" before the teacher listens
    - `jobs`: ids of the active jobs that use the teacher
    - `since`: Unix time of the newest start
    - `attempt`: how often the teacher was started
    - `queued_tokens`: number of tokens that wait for the model
    - `active_streams`: number of open streams of its clients
    """

    key: str
    model: str
    engine: str
    state: str
    address: str
    jobs: tuple[str, ...]
    gpus: tuple[str, ...]
    since: float
    attempt: int
    reason: str
    queued_tokens: int = 0
    active_streams: int = 0

"""Selects the jobs of a server by state, age, owner and labels."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from clients.jobs.job import TERMINAL, Job, JobState
from protos.errors import InvalidInput

if TYPE_CHECKING:
    from clients.jobs.client import DistillClient

RESUMABLE = frozenset({JobState.FAILED, JobState.CANCELLED})
CANCELLABLE = frozenset(JobState) - TERMINAL - {JobState.CANCELLING}
_MAX_JOBS = 1_000_000
_SECONDS = {"m": 60, "h": 3600, "d": 24 * 3600}
_TIME = re.compile(r"(\d{1,6})([mhd])")


def jobs_in(
    client: DistillClient,
    states: Collection[JobState],
    *,
    older_than_seconds: float = 0.0,
    own_only: bool = False,
    labels: Mapping[str, str] | None = None,
) -> Sequence[Job]:
    """Return the jobs in these states, the oldest first.

    `older_than_seconds`: minimum time since their end or, if they have not ended, since they were
    submitted. `own_only` and `labels` are `mine` and `labels` of DistillClient.list.
    """
    latest_time = time.time() - older_than_seconds
    jobs_by_id = {
        job.id: job
        for state in states
        for job in client.list(state=state, limit=_MAX_JOBS, mine=own_only, labels=labels)
    }
    old_jobs = [
        job for job in jobs_by_id.values() if (job.ended_at or job.created_at) <= latest_time
    ]
    return sorted(old_jobs, key=lambda job: job.created_at)


def seconds_of(text: str) -> float:
    """Return the seconds of a time such as `30d`, `12h` or `90m`; raises InvalidInput."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise InvalidInput(
            f"{text!r} is not a time", field="--older-than", hint="such as 30d or 12h"
        )
    return float(int(match[1]) * _SECONDS[match[2]])

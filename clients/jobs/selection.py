"""The jobs of a server that a command is for, if it names none."""

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
_MOST_JOBS = 1_000_000
_SECONDS = {"m": 60, "h": 3600, "d": 24 * 3600}
_TIME = re.compile(r"(\d{1,6})([mhd])")


def jobs_in(
    client: DistillClient,
    states: Collection[JobState],
    *,
    older_than_seconds: float = 0.0,
    mine: bool = False,
    labels: Mapping[str, str] | None = None,
) -> Sequence[Job]:
    """Return the jobs in these states, the oldest first.

    `older_than_seconds`: the least time since their end or, if they have not ended, their start of
    waiting in the queue. `mine` and `labels` are those of DistillClient.list.
    """
    until = time.time() - older_than_seconds
    found = {
        job.id: job
        for state in states
        for job in client.list(state=state, limit=_MOST_JOBS, mine=mine, labels=labels)
    }
    old = [job for job in found.values() if (job.ended_at or job.created_at) <= until]
    return sorted(old, key=lambda job: job.created_at)


def seconds_of(text: str) -> float:
    """Return the seconds of a time such as `30d`, `12h` or `90m`; raises InvalidInput."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise InvalidInput(
            f"{text!r} is not a time", field="--older-than", hint="such as 30d or 12h"
        )
    return float(int(found[1]) * _SECONDS[found[2]])

"""The attempts of a job on a time line, found in its events."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

from clients.jobs.job import TERMINAL, Job, JobEvent, JobState
from distill_server.jobs.store import JobStore

_MOST_ATTEMPTS = 50


def attempts_of(store: JobStore, job: Job) -> list[dict[str, Any]]:
    """Return the newest 50 attempts of a job as JSON records, oldest first.

    Times are Unix seconds: `queued_at`, `started_at` (0: not started) and `ended_at` (0: not over).
    `end` is the final state, INTERRUPTED if the job was queued again by the server, or "" while the
    attempt goes on; `reason` says why. `step` is the newest step. A job of a million events costs
    about 60 reads for each attempt (three bisections), because its events are not scanned.
    """
    oldest = max(1, job.attempt - _MOST_ATTEMPTS + 1)
    return [_record(store, job, number) for number in range(oldest, job.attempt + 1)]


def _record(store: JobStore, job: Job, number: int) -> dict[str, Any]:
    def event(seq: int) -> JobEvent:
        return store.events(job.id, seq - 1, 1)[0]

    def first(found: Callable[[JobEvent], bool]) -> int:
        """Return the first `seq` from which on `found` holds; one above the last if it never does.

        Attempts and their states only go forward, so the events can be searched by bisection.
        """
        seqs = range(1, job.last_seq + 1)
        return 1 + bisect.bisect_left(seqs, True, key=lambda seq: found(event(seq)))

    queued = event(first(lambda one: one.attempt >= number))
    next_seq = first(lambda one: one.attempt > number)
    last = event(next_seq - 1)
    started_seq = first(
        lambda one: (one.attempt, one.state is not JobState.QUEUED) >= (number, True)
    )
    started = event(started_seq) if started_seq < next_seq else None
    ended_at, end, reason = 0.0, "", ""
    if last.state in TERMINAL:
        ended_at, end, reason = last.time, last.state.value, last.reason
    elif next_seq <= job.last_seq:
        after = event(next_seq)
        ended_at, end, reason = after.time, "INTERRUPTED", after.reason
    return {
        "attempt": number,
        "queued_at": queued.time,
        "started_at": started.time if started and started.state not in TERMINAL else 0.0,
        "ended_at": ended_at,
        "end": end,
        "reason": reason,
        "step": last.step,
    }

"""The timeline of attempts equals one computed from all events."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from clients.jobs.job import TERMINAL, Job, JobState
from distill_server.dashboard.job_details import attempts_of
from distill_server.jobs.database import open_database
from distill_server.jobs.store import Attempt, Change, JobStore
from distill_server.runners.machine import Share
from tests.distill_server.conftest import job_config


@pytest.fixture
def store(tmp_path: Path) -> Any:
    clock = itertools.count(1000)
    with open_database(tmp_path / "server.sqlite") as connection:
        connection.execute("PRAGMA synchronous = OFF")
        yield JobStore(connection, on_change=lambda _: None, now=lambda: float(next(clock)))


def run(store: JobStore, job_id: str, steps: range) -> None:
    job = store.begin_attempt(
        store.job(job_id), Share(1), Change(JobState.PREPARING, phase="starting")
    )
    store.change(job.id, Change(JobState.RUNNING))
    store.change(job.id, *(Change(step=step, metrics={"loss": 1.0}) for step in steps))


def requeue(store: JobStore, job_id: str, reason: str, phase: str = "") -> None:
    number = store.job(job_id).attempt + 1
    change = Change(JobState.QUEUED, reason=reason, phase=phase)
    store.queue_again(job_id, Attempt(number), change, at_end=False)


def scan_attempts(store: JobStore, job: Job) -> list[dict[str, Any]]:
    """Compute the attempts from all events."""
    events = store.events(job.id, 0, -1)
    records = []
    for number in range(1, job.attempt + 1):
        attempt_events = [event for event in events if event.attempt == number]
        later_events = [event for event in events if event.attempt > number]
        last_event = attempt_events[-1]
        end = ("", 0.0, "")
        if last_event.state in TERMINAL:
            end = (last_event.state.value, last_event.time, last_event.reason)
        elif later_events:
            end = ("INTERRUPTED", later_events[0].time, later_events[0].reason)
        starts = [event.time for event in attempt_events if event.state is JobState.PREPARING]
        records.append(
            {
                "attempt": number,
                "queued_at": attempt_events[0].time,
                "started_at": starts[0] if starts else 0.0,
                "ended_at": end[1],
                "end": end[0],
                "reason": end[2],
                "step": last_event.step,
            }
        )
    return records


def test_every_way_to_end(store: JobStore) -> None:
    job = store.add("job", job_config(max_steps=100), "")
    assert attempts_of(store, job) == scan_attempts(store, job)
    run(store, "job", range(1, 7))
    assert attempts_of(store, store.job("job")) == scan_attempts(store, store.job("job"))
    requeue(store, "job", "the trainer was killed by signal 9 at step 6", "retrying in 10 s")
    run(store, "job", range(5, 9))
    store.change("job", Change(JobState.CANCELLING))
    store.change("job", Change(JobState.CANCELLED, reason="cancelled on request"))
    requeue(store, "job", "")
    store.change("job", Change(JobState.CANCELLED, reason="cancelled while queued"))
    requeue(store, "job", "")
    run(store, "job", range(9, 101))
    store.change("job", Change(JobState.SUCCEEDED))
    job = store.job("job")
    attempts = attempts_of(store, job)
    assert attempts == scan_attempts(store, job)
    ends = [(attempt["end"], bool(attempt["started_at"]), attempt["step"]) for attempt in attempts]
    assert ends == [
        ("INTERRUPTED", True, 6),
        ("CANCELLED", True, 8),
        ("CANCELLED", False, 8),
        ("SUCCEEDED", True, 100),
    ]
    assert "signal 9" in attempts[0]["reason"]


def test_the_newest_fifty_of_a_long_job_cost_few_reads(store: JobStore) -> None:
    store.add("job", job_config(max_steps=9000), "")
    for number in range(60):
        run(store, "job", range(1 + 50 * number, 51 + 50 * number))
        requeue(store, "job", "the machine was restarted")
    job, expected = store.job("job"), scan_attempts(store, store.job("job"))
    reads: list[int] = []
    events = store.events

    def count_reads(job_id: str, after_seq: int, limit: int) -> Any:
        reads.append(limit)
        return events(job_id, after_seq, limit)

    store.events = count_reads  # type: ignore[method-assign]
    assert attempts_of(store, job) == expected[-50:]
    assert set(reads) == {1}
    assert len(reads) <= 50 * 45

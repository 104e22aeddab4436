"""The acknowledged calls of clients, and the invariants of the server's database and logs.

    I1  an acknowledged submit is stored
    I2  one key is one job, and one job has one key
    I3  events count from 1 without a gap or a repeat, in the database and for every watcher;
        of a job with more than 500, steps before the newest 500 may be thinned
    I4  every change of state is a legal one
    I5  a job that is over stays over until it is resumed
    I6  attempts grow by one, and only on the way into the queue
    I7  an attempt's trainer starts once at most, and no two of a job are alive at once
    I8  the slots of the server are never exceeded

The database is read with plain SQL, beside the server if it runs.
"""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clients.jobs.job import TERMINAL, TRANSITIONS, JobEvent, JobState
from distill_server.jobs.database import NEWEST

ACTIVE = frozenset({JobState.PREPARING, JobState.RUNNING, JobState.CANCELLING})
BEGUN = "starts after step"
TWO_AT_ONCE = "another trainer is alive"


@dataclass(frozen=True)
class Record:
    """One event of one job, as it is stored."""

    seq: int
    time: float
    state: JobState
    attempt: int


class History:
    """Records acknowledged calls and `check`s them against the database. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._submits: list[tuple[str, str]] = []
        self._resumes: Counter[str] = Counter()
        self._watched_seqs: list[tuple[str, list[int]]] = []

    def submitted(self, key: str, job_id: str) -> None:
        with self._lock:
            self._submits.append((key, job_id))

    def resumed(self, job_id: str) -> None:
        """A resume was requested, whether or not an answer came."""
        with self._lock:
            self._resumes[job_id] += 1

    def watched(self, job_id: str, events: Sequence[JobEvent]) -> None:
        """Record all events of one watcher, from the first event on."""
        with self._lock:
            self._watched_seqs.append((job_id, [event.seq for event in events]))

    def check(self, runs: Path, slots: int) -> int:
        """Raise AssertionError that names the broken rule; return the number of checked events."""
        jobs = stored_events(runs)
        self._check_submits(jobs)
        for job_id, records in jobs.items():
            self._check_job(job_id, records)
            check_logs(job_id, runs / job_id / "logs")
        for job_id, seqs in self._watched_seqs:
            assert_numbered(seqs, job_id)
            assert seqs[-1:] <= [record.seq for record in jobs[job_id][-1:]], ("I3", job_id)
        check_slots(jobs, slots)
        return sum(len(records) for records in jobs.values())

    def _check_submits(self, jobs: dict[str, list[Record]]) -> None:
        for key, job_id in self._submits:
            assert job_id in jobs, ("I1", key, job_id)
        keyed_submits = {pair for pair in self._submits if pair[0]}
        assert len({key for key, _ in keyed_submits}) == len(keyed_submits), ("I2", keyed_submits)
        assert len({job_id for _, job_id in keyed_submits}) == len(keyed_submits), (
            "I2",
            keyed_submits,
        )

    def _check_job(self, job_id: str, records: Sequence[Record]) -> None:
        assert_numbered([record.seq for record in records], job_id)
        assert (records[0].state, records[0].attempt) == (JobState.QUEUED, 1), ("I4", job_id)
        resume_count = 0
        for old, new in itertools.pairwise(records):
            assert new.time >= old.time, ("time", job_id, old, new)
            if old.state is not new.state:
                assert (old.state, new.state) in TRANSITIONS, ("I4", job_id, old, new)
            resume_count += old.state in TERMINAL and new.state is JobState.QUEUED
            is_requeued = old.state is not JobState.QUEUED and new.state is JobState.QUEUED
            assert new.attempt == old.attempt + is_requeued, ("I6", job_id, old, new)
        assert resume_count <= self._resumes[job_id], ("I5", job_id)


def assert_numbered(seqs: Sequence[int], job_id: str) -> None:
    """Assert rule I3."""
    assert seqs[:1] in ([], [1]), ("I3", job_id, seqs)
    thinned = seqs[-1] - NEWEST if seqs else 0
    for old, new in itertools.pairwise(seqs):
        assert new == old + 1 or (old < new and old < thinned), ("I3", job_id, seqs)


def stored_events(runs: Path) -> dict[str, list[Record]]:
    uri = f"file:{runs / 'server.sqlite'}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
        records_by_job: dict[str, list[Record]] = {
            job_id: [] for (job_id,) in connection.execute("SELECT id FROM jobs")
        }
        events = "SELECT job_id, seq, time, state, attempt FROM events ORDER BY job_id, seq"
        for job_id, seq, time, state, attempt in connection.execute(events):
            records_by_job[job_id].append(Record(seq, time, JobState(state), attempt))
    return records_by_job


def check_logs(job_id: str, logs: Path) -> None:
    """Assert rule I7: each trainer logs its start and takes the lock of the run directory."""
    for log in logs.glob("attempt-*/rank-0.log"):
        text = log.read_text()
        assert text.count(BEGUN) <= 1, ("I7", job_id, log)
        assert TWO_AT_ONCE not in text, ("I7", job_id, log)


def check_slots(jobs: dict[str, list[Record]], slots: int) -> None:
    changes: list[tuple[float, int]] = []
    for records in jobs.values():
        active = False
        for record in records:
            if (record.state in ACTIVE) != active:
                active = not active
                changes.append((record.time, 1 if active else -1))
    running = 0
    for _, change in sorted(changes):
        running += change
        assert running <= slots, ("I8", running, slots)

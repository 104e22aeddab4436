"""Prometheus metrics of a distill server.

Gauges are read from the database at each scrape. Counters count since the start of the server. They
are not read from the database, because their values would fall when jobs are removed.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from clients.jobs.job import TERMINAL, JobState
from distill_server.jobs.run_files import RunFiles
from distill_server.jobs.store import JobStore
from distill_server.runners.machine import Machine
from distill_server.teachers.started import STATES, TeacherProcess
from protos.errors import ErrorCode

_PREFIX = "distill_server_"


class ServerMetrics(Collector):
    """The metrics of one server. Collect them on its event loop."""

    def __init__(
        self,
        store: JobStore,
        machine: Machine,
        teachers: Iterable[TeacherProcess],
        runs: Path,
        files: RunFiles,
        refusals: Counter[str] | None = None,
    ) -> None:
        """`teachers` are the teachers that the server runs.

        `refusals` has the number of refused calls by error code.
        """
        self._refusals = Counter() if refusals is None else refusals
        self._store = store
        self._slots = machine.slots
        self._teachers = teachers
        self._disk = _DiskSpace(runs, files)

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        store, tally = self._store, self._store.tally
        counts = {state.value: count for state, count in store.count_by_state().items()}
        yield _make_gauge_by_state("jobs", "Jobs by state.", counts)
        ended_jobs = CounterMetricFamily(
            _PREFIX + "ended_jobs", "Ends of jobs since the start.", labels=["state"]
        )
        for state in sorted(TERMINAL):
            ended_jobs.add_metric([state], tally.ends[state])
        yield ended_jobs
        yield CounterMetricFamily(
            _PREFIX + "attempts", "Attempts of all jobs since the start.", tally.attempts
        )
        yield CounterMetricFamily(
            _PREFIX + "retries", "Attempts started because a trainer died.", tally.retries
        )
        yield _make_gauge("slots", "Jobs that can run at once.", self._slots)
        yield _make_gauge(
            "queue_seconds",
            "Seconds since the next job in the queue was queued; 0 if the queue is empty.",
            store.oldest_wait(),
        )
        yield _make_gauge(
            "waiting_jobs",
            "Queued jobs that wait for an unreachable teacher or other service.",
            len(store.waiting_jobs()),
        )
        yield _make_gauge(
            "silent_seconds",
            "Longest time without an event of a running job; 0 if no job runs.",
            _longest_silence(store),
        )
        teachers_by_state = Counter(teacher.state for teacher in self._teachers)
        yield _make_gauge_by_state(
            "teachers",
            "Teachers that the server runs, by state.",
            {state: teachers_by_state[state] for state in STATES},
        )
        refused_calls = CounterMetricFamily(
            _PREFIX + "refused_calls",
            "Calls without a valid token or without the role, since the start.",
            labels=["code"],
        )
        for code in (ErrorCode.PERMISSION_DENIED, ErrorCode.UNAUTHENTICATED):
            refused_calls.add_metric([code.value], self._refusals[code.value])
        yield refused_calls
        yield from self._disk.collect()


class _DiskSpace:
    """Free and total space of the file system of the run directories.

    A thread reads the space for the next scrape, because a network file system may not answer. If
    the file system does not answer, there are no samples.
    """

    def __init__(self, runs: Path, files: RunFiles) -> None:
        self._read_usage = partial(shutil.disk_usage, runs)
        self._files = files
        self._future: asyncio.Future[Any] = files.start(self._read_usage)

    def collect(self) -> Iterator[Metric]:
        if not self._future.done():
            return
        if self._future.exception() is None:
            usage = self._future.result()
            yield _make_gauge(
                "disk_free_bytes", "Free space for run directories, last scrape.", usage.free
            )
            yield _make_gauge("disk_bytes", "Size of the file system of --runs.", usage.total)
        self._future = self._files.start(self._read_usage)


def _longest_silence(store: JobStore) -> float:
    times = (
        event.time
        for job in store.in_state(JobState.RUNNING)
        for event in store.events(job.id, job.last_seq - 1, 1)
    )
    current_time = store.now()
    return max(0.0, current_time - min(times, default=current_time))


def _make_gauge(name: str, meaning: str, reading: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, meaning, reading)


def _make_gauge_by_state(name: str, meaning: str, counts: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(_PREFIX + name, meaning, labels=["state"])
    for state, count in counts.items():
        family.add_metric([state], count)
    return family

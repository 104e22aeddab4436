"""Prometheus metrics of a distill server.

Gauges are read from the database at each scrape. Counters count since the start of the server: in
the database they would fall when jobs are removed.
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
from distill_server.teachers.started import STATES, Teacher

_PREFIX = "distill_server_"


class ServerMetrics(Collector):
    """The metrics of one server. Collect them on its event loop."""

    def __init__(
        self,
        store: JobStore,
        machine: Machine,
        teachers: Iterable[Teacher],
        runs: Path,
        files: RunFiles,
    ) -> None:
        """`teachers`: those that the server runs."""
        self._store = store
        self._slots = machine.slots
        self._teachers = teachers
        self._disk = _Disk(runs, files)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        store, tally = self._store, self._store.tally
        counts = {state.value: count for state, count in store.count_by_state().items()}
        yield _by_state("jobs", "Jobs by state.", counts)
        ended = CounterMetricFamily(
            _PREFIX + "ended_jobs", "Ends of jobs since the start.", labels=["state"]
        )
        for state in sorted(TERMINAL):
            ended.add_metric([state], tally.ends[state])
        yield ended
        yield CounterMetricFamily(
            _PREFIX + "attempts", "Attempts of all jobs since the start.", tally.attempts
        )
        yield CounterMetricFamily(
            _PREFIX + "retries", "Those that were started because a trainer died.", tally.retries
        )
        yield _gauge("slots", "Jobs that can run at once.", self._slots)
        yield _gauge(
            "queue_seconds",
            "Seconds since the next job in the queue was queued; 0 if the queue is empty.",
            store.oldest_wait(),
        )
        yield _gauge(
            "waiting_jobs",
            "Queued jobs that wait for a teacher or another service that is away.",
            len(store.waiting_jobs()),
        )
        yield _gauge(
            "silent_seconds",
            "Longest time without an event of a running job; 0 if none runs.",
            _longest_silence(store),
        )
        running = Counter(teacher.state for teacher in self._teachers)
        yield _by_state(
            "teachers",
            "Teachers that the server runs, by state.",
            {state: running[state] for state in STATES},
        )
        yield from self._disk.collect()


class _Disk:
    """Free and whole space of the file system of the run directories.

    It is read in a thread for the next scrape: a network file system may not answer. Then there
    are no samples.
    """

    def __init__(self, runs: Path, files: RunFiles) -> None:
        self._read = partial(shutil.disk_usage, runs)
        self._files = files
        self._future: asyncio.Future[Any] = files.start(self._read)

    def collect(self) -> Iterator[Metric]:
        if not self._future.done():
            return
        if self._future.exception() is None:
            usage = self._future.result()
            yield _gauge(
                "disk_free_bytes", "Free space for run directories, last scrape.", usage.free
            )
            yield _gauge("disk_bytes", "Size of the file system of --runs.", usage.total)
        self._future = self._files.start(self._read)


def _longest_silence(store: JobStore) -> float:
    times = (
        event.time
        for job in store.in_state(JobState.RUNNING)
        for event in store.events(job.id, job.last_seq - 1, 1)
    )
    now = store.now()
    return max(0.0, now - min(times, default=now))


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, meaning, value)


def _by_state(name: str, meaning: str, values: dict[str, int]) -> Metric:
    found = GaugeMetricFamily(_PREFIX + name, meaning, labels=["state"])
    for state, value in values.items():
        found.add_metric([state], value)
    return found

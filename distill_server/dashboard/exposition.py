"""Prometheus metrics of a distill server.

All numbers are read from the database at each scrape, so they survive a restart of the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from distill_server.jobs.store import JobStore

_PREFIX = "distill_server_"


class _Jobs(Collector):
    def __init__(self, store: JobStore, slots: int) -> None:
        self._store = store
        self._slots = slots

    def collect(self) -> Iterator[Metric]:
        jobs = GaugeMetricFamily(_PREFIX + "jobs", "Jobs by state.", labels=["state"])
        for state, count in self._store.counts().items():
            jobs.add_metric([state], count)
        yield jobs
        attempts, retries = self._store.attempt_counts()
        yield CounterMetricFamily(_PREFIX + "attempts", "Attempts of all jobs.", attempts)
        yield CounterMetricFamily(
            _PREFIX + "retries", "Attempts that were started because a trainer died.", retries
        )
        yield GaugeMetricFamily(_PREFIX + "slots", "Jobs that can run at once.", self._slots)
        yield GaugeMetricFamily(
            _PREFIX + "queue_seconds",
            "Seconds since the next job in the queue was queued; 0 if the queue is empty.",
            self._store.oldest_wait(),
        )


def exposition(store: JobStore, slots: int) -> Callable[[], bytes]:
    """Return a function that renders the current metrics in the text format of Prometheus.

    `slots` is the number of jobs that can run at once.
    """
    registry = CollectorRegistry()
    registry.register(_Jobs(store, slots))
    return lambda: generate_latest(registry)

"""The metrics of the teacher service."""

from __future__ import annotations

import logging
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from protos.errors import DistillError, ErrorCode
from protos.program.logs import fields

log = logging.getLogger(__name__)

_PREFIX = "distill_teacher_"
_FILL_BUCKETS = tuple(tenths / 10 for tenths in range(1, 11))
_SECONDS_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class TeacherMetrics:
    """The metrics of one running teacher, in their own registry. Thread-safe."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def seconds(name: str, meaning: str) -> Histogram:
            return Histogram(_PREFIX + name, meaning, buckets=_SECONDS_BUCKETS, registry=registry)

        self._requests = Counter(
            _PREFIX + "requests", "Requests by outcome.", ["code"], registry=registry
        )
        for code in ("OK", "CANCELLED", *ErrorCode):
            self._requests.labels(code)
        self._scored_tokens = Counter(
            _PREFIX + "scored_tokens", "Rows computed by the model.", registry=registry
        )
        self._batch_fill = Histogram(
            _PREFIX + "batch_fill_ratio",
            "Tokens of a batch without padding (vLLM: in flight), divided by --max-batch-tokens.",
            buckets=_FILL_BUCKETS,
            registry=registry,
        )
        self._forward_seconds = seconds(
            "forward_seconds", "Time of a batch in the model (vLLM: of a query)."
        )
        self._first_chunk_seconds = seconds(
            "first_chunk_seconds", "Time from a request to its first rows."
        )
        self._request_seconds = seconds("request_seconds", "Time from a request to its last rows.")

    @contextmanager
    def measure_request(self) -> Iterator[MeasuredRequest]:
        """Measure one request: count and log it by the outcome of the `with` block.

        The times are recorded only if the block ends without an exception.
        """
        measured = MeasuredRequest(time.perf_counter())
        code = "OK"
        try:
            yield measured
        except (CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        except Exception as error:
            code = error.code if isinstance(error, DistillError) else ErrorCode.INTERNAL
            raise
        finally:
            seconds = time.perf_counter() - measured.start
            self._requests.labels(code).inc()
            log.debug(
                "request", extra=fields(code=code, rows=measured.rows, seconds=round(seconds, 6))
            )
        self._first_chunk_seconds.observe(measured.seconds_to_first)
        self._request_seconds.observe(seconds)

    def count_refusal(self, error: DistillError) -> None:
        """Count a request that was refused before any of its sequences was scored."""
        self._requests.labels(error.code).inc()

    def record_forward(self, *, rows: int, fill: float, seconds: float) -> None:
        """Record one scored batch; for an engine with continuous batching, one query.

        `fill` is the number of tokens without padding (or of tokens in flight), divided by the
        limit. `seconds` is the time in the engine.
        """
        self._scored_tokens.inc(rows)
        self._batch_fill.observe(fill)
        self._forward_seconds.observe(seconds)

    def add_gauge(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is `read()` at the time of each scrape."""
        Gauge(_PREFIX + name, meaning, registry=self.registry).set_function(read)

    def add_cache_counters(self, read: Callable[[], Mapping[str, tuple[int, int]]]) -> None:
        """Add the hit and miss counters of the cache tiers; `read()` returns them by tier name."""
        self.registry.register(_CacheCollector(read))

    def read_total(self, name: str, **labels: str) -> int:
        """Return the value of the sample with this name and these labels; 0 if there is none.

        `name` is without the prefix that all metrics of the teacher have.
        """
        return int(self.registry.get_sample_value(_PREFIX + name, labels) or 0)


@dataclass
class MeasuredRequest:
    """Measurements of one request.

    - start: start of the request on the clock of `time.perf_counter`, in seconds.
    - seconds_to_first: seconds from the start until the first rows are ready.
    - rows: number of rows.
    """

    start: float
    seconds_to_first: float = 0.0
    rows: int = 0

    def record_answer(self, rows: int) -> None:
        """Record the number of rows, and the time until they were ready to be sent."""
        self.rows = rows
        self.seconds_to_first = time.perf_counter() - self.start


@dataclass(frozen=True)
class _CacheCollector(Collector):
    """Exports (hits, misses) of each cache tier as counters."""

    read: Callable[[], Mapping[str, tuple[int, int]]]

    def collect(self) -> Iterator[CounterMetricFamily]:
        hits_help, misses_help = "Sequences found in a tier.", "Sequences not found in a tier."
        hits = CounterMetricFamily(_PREFIX + "cache_hits", hits_help, labels=["tier"])
        misses = CounterMetricFamily(_PREFIX + "cache_misses", misses_help, labels=["tier"])
        for tier, (hit_count, miss_count) in self.read().items():
            hits.add_metric([tier], hit_count)
            misses.add_metric([tier], miss_count)
        yield hits
        yield misses

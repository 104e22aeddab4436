"""The Prometheus metrics of the rollout service."""

from __future__ import annotations

import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from protos.errors import DistillError, ErrorCode

_PREFIX = "distill_rollouts_"
_SECONDS_BUCKETS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)


class RolloutMetrics:
    """The Prometheus metrics of one running rollout service, in a separate registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def build_counter(name: str, meaning: str) -> Counter:
            return Counter(_PREFIX + name, meaning, ["code"], registry=registry)

        def build_histogram(name: str, meaning: str) -> Histogram:
            return Histogram(_PREFIX + name, meaning, buckets=_SECONDS_BUCKETS, registry=registry)

        self._orders = build_counter("orders", "Orders by outcome.")
        self._loads = build_counter("weight_loads", "Loads of weights by outcome.")
        for code in ("OK", "CANCELLED", *ErrorCode):
            self._orders.labels(code)
            self._loads.labels(code)
        self._sequences = Counter(
            _PREFIX + "sequences", "Sequences that were sampled to their end.", registry=registry
        )
        self._tokens = Counter(
            _PREFIX + "sampled_tokens", "Tokens of those sequences.", registry=registry
        )
        self._order_seconds = build_histogram(
            "order_seconds", "From the arrival of an order to its end."
        )
        self._load_seconds = build_histogram(
            "weight_load_seconds", "Time of one load, with its probe."
        )

    @contextmanager
    def order(self) -> Iterator[None]:
        """Return a context that counts an order by its outcome.

        It also records the time of an order that succeeds. An error of the order must leave the
        context, so that it is counted.
        """
        with _measure_outcome(self._orders, self._order_seconds):
            yield

    @contextmanager
    def load(self) -> Iterator[None]:
        """Return a context that counts a load of weights and measures its time; see `order`."""
        with _measure_outcome(self._loads, self._load_seconds):
            yield

    def sequence(self, tokens: int) -> None:
        """Count a sampled sequence and its tokens."""
        self._sequences.inc()
        self._tokens.inc(tokens)

    def gauge(self, name: str, meaning: str, read_value: Callable[[], float]) -> None:
        """Add a gauge whose value is `read_value()` at the time of each scrape."""
        Gauge(_PREFIX + name, meaning, registry=self.registry).set_function(read_value)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens of all sequences that were sampled to their end."""
        return int(self.registry.get_sample_value(f"{_PREFIX}sampled_tokens_total") or 0)


@contextmanager
def _measure_outcome(count: Counter, seconds: Histogram) -> Iterator[None]:
    start_time = time.perf_counter()
    code = "OK"
    try:
        yield
    except (CancelledError, GeneratorExit):
        code = "CANCELLED"
        raise
    except Exception as error:
        code = error.code if isinstance(error, DistillError) else ErrorCode.INTERNAL
        raise
    finally:
        count.labels(code).inc()
    seconds.observe(time.perf_counter() - start_time)

"""The metrics of the rollout service."""

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
    """The metrics of one running rollout service, in their own registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def count(name: str, meaning: str) -> Counter:
            return Counter(_PREFIX + name, meaning, ["code"], registry=registry)

        def seconds(name: str, meaning: str) -> Histogram:
            return Histogram(_PREFIX + name, meaning, buckets=_SECONDS_BUCKETS, registry=registry)

        self._orders = count("orders", "Orders by outcome.")
        self._loads = count("weight_loads", "Loads of weights by outcome.")
        for code in ("OK", "CANCELLED", *ErrorCode):
            self._orders.labels(code)
            self._loads.labels(code)
        self._sequences = Counter(
            _PREFIX + "sequences", "Sequences that were sampled to their end.", registry=registry
        )
        self._tokens = Counter(
            _PREFIX + "sampled_tokens", "Tokens of those sequences.", registry=registry
        )
        self._order_seconds = seconds("order_seconds", "From the arrival of an order to its end.")
        self._load_seconds = seconds("weight_load_seconds", "Time of one load, with its probe.")

    @contextmanager
    def order(self) -> Iterator[None]:
        """Measure an order: count it by the outcome of the block, and record its time if it is OK.

        The block raises the error of the order.
        """
        with _measured(self._orders, self._order_seconds):
            yield

    @contextmanager
    def load(self) -> Iterator[None]:
        """Measure a load of weights, as `order` does."""
        with _measured(self._loads, self._load_seconds):
            yield

    def sequence(self, tokens: int) -> None:
        """Count a sampled sequence."""
        self._sequences.inc()
        self._tokens.inc(tokens)

    def gauge(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is `read()` at the time of each scrape."""
        Gauge(_PREFIX + name, meaning, registry=self.registry).set_function(read)

    @property
    def sampled_tokens(self) -> int:
        """Tokens of all sequences that were sampled to their end."""
        return int(self.registry.get_sample_value(f"{_PREFIX}sampled_tokens_total") or 0)


@contextmanager
def _measured(count: Counter, seconds: Histogram) -> Iterator[None]:
    began = time.perf_counter()
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
    seconds.observe(time.perf_counter() - began)

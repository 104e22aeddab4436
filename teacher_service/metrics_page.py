"""What the teacher counts, and the page where Prometheus reads it."""

from __future__ import annotations

import logging
import socket
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from protos.errors import DistillError, ErrorCode, InvalidInput
from teacher_service.logs import fields

log = logging.getLogger(__name__)

_PREFIX = "distill_teacher_"
_FILL_BUCKETS = tuple(tenths / 10 for tenths in range(1, 11))
_SECONDS_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class TeacherMetrics:
    """The counters of one running teacher, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def seconds(name: str, meaning: str) -> Histogram:
            return Histogram(_PREFIX + name, meaning, buckets=_SECONDS_BUCKETS, registry=registry)

        self._requests = Counter(
            _PREFIX + "requests", "Requests by outcome.", ["code"], registry=registry
        )
        for code in ("OK", "CANCELLED", *ErrorCode):
            self._requests.labels(code)
        self._tokens = Counter(
            _PREFIX + "scored_tokens", "Rows made by the model.", registry=registry
        )
        self._fill = Histogram(
            _PREFIX + "batch_fill_ratio",
            "Tokens of a batch, padding not counted, over --max-batch-tokens.",
            buckets=_FILL_BUCKETS,
            registry=registry,
        )
        self._forward = seconds("forward_seconds", "One batch through the model and the head.")
        self._first = seconds("first_chunk_seconds", "From a request to its first rows.")
        self._whole = seconds("request_seconds", "From a request to its last rows.")

    @contextmanager
    def request(self) -> Iterator[MeasuredRequest]:
        """Count and log a request by how the block ends."""
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
            seconds = time.perf_counter() - measured.began
            self._requests.labels(code).inc()
            log.debug(
                "request", extra=fields(code=code, rows=measured.rows, seconds=round(seconds, 6))
            )
        self._first.observe(measured.seconds_to_first)
        self._whole.observe(seconds)

    def forward(self, *, rows: int, fill: float, seconds: float) -> None:
        """One batch has been scored."""
        self._tokens.inc(rows)
        self._fill.observe(fill)
        self._forward.observe(seconds)

    def gauge(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        """A number that is read when it is asked for."""
        Gauge(_PREFIX + name, meaning, registry=self.registry).set_function(read)

    def cache(self, read: Callable[[], Mapping[str, tuple[int, int]]]) -> None:
        """(hits, misses) of each tier, read when they are asked for."""
        self.registry.register(_CacheCollector(read))

    def total(self, name: str, **labels: str) -> int:
        """A counter's value."""
        return int(self.registry.get_sample_value(_PREFIX + name, labels) or 0)


@dataclass
class MeasuredRequest:
    """When a request came, how long its first rows took, and how many it has."""

    began: float
    seconds_to_first: float = 0.0
    rows: int = 0

    def answered(self, rows: int) -> None:
        """The first rows are there."""
        self.rows = rows
        self.seconds_to_first = time.perf_counter() - self.began


@dataclass(frozen=True)
class _CacheCollector(Collector):
    """(hits, misses) by tier."""

    read: Callable[[], Mapping[str, tuple[int, int]]]

    def collect(self) -> Iterator[CounterMetricFamily]:
        hits = CounterMetricFamily(_PREFIX + "cache_hits", "Sequences found.", labels=["tier"])
        misses = CounterMetricFamily(_PREFIX + "cache_misses", "Not found.", labels=["tier"])
        for tier, (found, missed) in self.read().items():
            hits.add_metric([tier], found)
            misses.add_metric([tier], missed)
        yield hits
        yield misses


@contextmanager
def served(metrics: TeacherMetrics, host: str, port: int) -> Iterator[str]:
    """Serve the page by a thread of its own; gives its HOST:PORT. Raises InvalidInput."""
    try:
        kind = _PageOverIPv6 if ":" in host else _Page
        server = make_server(host, port, make_wsgi_app(metrics.registry), kind, _Reading)
    except OSError as error:
        raise InvalidInput(
            f"cannot listen on {host}:{port}: {error.strerror}",
            field="--metrics-port",
            hint="choose another one, or 0 for any free port",
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Reading(WSGIRequestHandler):
    timeout = 1.0  # of silence

    def log_message(self, format: str, *_: object) -> None:
        """Its readers come every few seconds."""


class _Page(WSGIServer):
    """One reader at a time. The page asks for no token: however many connect and say nothing, they
    take no thread, and none of the descriptors that the teacher's own clients need.
    """

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("metrics: a reader went away", exc_info=True)


class _PageOverIPv6(_Page):
    address_family = socket.AF_INET6

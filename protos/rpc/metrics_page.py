"""The HTTP page of a service for its operators: /metrics for Prometheus, /healthz and /readyz."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from protos.errors import InvalidInput

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ANSWER_SECONDS = 5.0

_T = TypeVar("_T")


class MetricsPage:
    """The content of the page, as a WSGI application.

    - /metrics: the metrics of the registry and of the process (CPU, memory, start).
    - /healthz: status 200 while the service is alive.
    - /readyz: status 200 while the service answers its clients, else 503.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.ready = False
        self.address = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        ProcessCollector(registry=registry)

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on, compute all answers on this event loop.

        If the loop does not compute an answer within five seconds, the page reports that the
        service is not alive (status 503).
        """
        self._loop = loop

    def start(self) -> None:
        """Report from now on that the service answers its clients. Log the address of the page."""
        self.ready = True
        log.info("metrics at http://%s/metrics", self.address)

    def stop(self) -> None:
        """Report from now on that the service does not answer its clients any more."""
        self.ready = False

    def __call__(
        self, environ: Mapping[str, Any], start_response: Callable[..., object]
    ) -> Iterable[bytes]:
        """Answer one HTTP request, as a WSGI application."""
        status, body = self._respond(environ["PATH_INFO"])
        headers = [("Content-Type", CONTENT_TYPE), ("Content-Length", str(len(body)))]
        start_response(status, headers)
        return [body]

    def _respond(self, path: str) -> tuple[str, bytes]:
        try:
            match path:
                case "/metrics":
                    return "200 OK", self._on_loop(partial(generate_latest, self.registry))
                case "/healthz":
                    self._on_loop(lambda: None)
                    return "200 OK", b"ok\n"
                case "/readyz" if self._on_loop(lambda: self.ready):
                    return "200 OK", b"ok\n"
                case "/readyz":
                    return "503 Service Unavailable", b"not ready\n"
            return "404 Not Found", b"/metrics, /healthz and /readyz are here\n"
        except (TimeoutError, RuntimeError):  # RuntimeError: the loop is closed
            return "503 Service Unavailable", b"the service does not answer\n"

    def _on_loop(self, call: Callable[[], _T]) -> _T:
        if self._loop is None:
            return call()
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 (the caller raises it)
                future.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return future.result(_ANSWER_SECONDS)


@contextmanager
def metrics_page(page: MetricsPage, address: tuple[str, int]) -> Iterator[None]:
    """Serve the page at `address` (host, port), on a thread, during the block.

    Port 0 means any free port, which is logged after the start of the service. Raises InvalidInput
    if the address cannot be used.
    """
    host, port = address
    try:
        kind = _PageOverIPv6 if ":" in host else _Page
        server = make_server(host, port, page, kind, _RequestHandler)
    except OSError as error:
        raise InvalidInput(
            f"cannot listen on {host}:{port}: {error.strerror}",
            field="--metrics-port",
            hint="choose another port, or 0 for any free port",
        ) from error
    stop_requested = threading.Event()

    def serve_requests() -> None:
        with server:
            while not stop_requested.is_set():
                server.handle_request()

    thread = threading.Thread(target=serve_requests, name="metrics", daemon=True)
    thread.start()
    display_host = f"[{host}]" if ":" in host else host
    page.address = f"{display_host}:{server.server_port}"
    try:
        yield
    finally:
        stop_requested.set()
        with contextlib.suppress(OSError):
            server.socket.shutdown(socket.SHUT_RDWR)  # ends the wait for a client
        # Wait only for a short time: the page may wait for the event loop that runs this line.
        thread.join(1.0)


class _RequestHandler(WSGIRequestHandler):
    timeout = 1.0  # seconds without data from the client

    def log_message(self, format: str, *_: object) -> None:
        """Log nothing: Prometheus reads the page every few seconds."""


class _Page(WSGIServer):
    """An HTTP server that serves one client at a time, without a token.

    Idle connections therefore take no threads, and no file descriptors that the clients of the
    service need.
    """

    def server_bind(self) -> None:
        """Bind the socket. Do not look up the name of the host, because this may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("metrics: a client disconnected", exc_info=True)


class _PageOverIPv6(_Page):
    address_family = socket.AF_INET6

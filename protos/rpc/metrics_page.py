"""The HTTP page of a service that serves its metrics to Prometheus."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from protos.errors import InvalidInput
from protos.rpc.logs import fields

log = logging.getLogger(__name__)


@contextmanager
def metrics_page(registry: CollectorRegistry, address: tuple[str, int] | None) -> Iterator[None]:
    """Serve /metrics of a registry at (host, port), on a thread; None: serve nothing.

    Port 0 is any free port; the log has the one that was taken. Raises InvalidInput if the address
    cannot be used.
    """
    if address is None:
        yield
        return
    host, port = address
    try:
        kind = _PageOverIPv6 if ":" in host else _Page
        server = make_server(host, port, make_wsgi_app(registry), kind, _Reading)
    except OSError as error:
        raise InvalidInput(
            f"cannot listen on {host}:{port}: {error.strerror}",
            field="--metrics-port",
            hint="choose another port, or 0 for any free port",
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        log.info("metrics", extra=fields(address=f"{host}:{server.server_port}"))
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Reading(WSGIRequestHandler):
    timeout = 1.0  # seconds without data from the client

    def log_message(self, format: str, *_: object) -> None:
        """Log nothing: Prometheus reads the page every few seconds."""


class _Page(WSGIServer):
    """Serves one client at a time.

    The page needs no token. Any number of idle connections takes no thread, and none of the file
    descriptors that the clients of the service need.
    """

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("metrics: a client disconnected", exc_info=True)


class _PageOverIPv6(_Page):
    address_family = socket.AF_INET6

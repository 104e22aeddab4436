"""Runs the dashboard with uvicorn on the event loop of the gRPC server, with limits for clients.

uvicorn has no timeout for a request that arrives slowly, nor for a client that does not read its
response. This module adds both, and a limit on the number of connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from protos.auth.tls import TlsFiles
from protos.errors import InvalidInput

log = logging.getLogger(__name__)

# A browser opens up to six. Connections beyond the limit are closed at once.
MAX_CONNECTIONS = 256
# The time for a whole request to arrive, and for a client to read some of a blocked response.
PATIENCE_SECONDS = 10.0
_GRACE_SECONDS = 3
_MAX_HEADERS_BYTES = 16 << 10


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 picks a free port. Raises InvalidInput if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise InvalidInput(
            f"cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}",
            field="--dashboard",
            hint="choose another port, or 0 for any free port",
        ) from error


@contextlib.asynccontextmanager
async def listening(app: ASGIApp, sock: socket.socket, tls: TlsFiles) -> AsyncIterator[None]:
    """Serve `app` on the socket within the block, then give running responses 3 s to finish."""
    server = _Server(
        uvicorn.Config(
            app,
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=_MAX_HEADERS_BYTES,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            **_tls_options(tls),
        )
    )
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield
    finally:
        server.should_exit = True
        await task


def _tls_options(tls: TlsFiles) -> dict[str, Any]:
    if tls.cert is None:
        return {}
    import ssl

    required = ssl.CERT_REQUIRED if tls.client_ca else ssl.CERT_NONE
    return {
        "ssl_certfile": tls.cert,
        "ssl_keyfile": tls.key,
        "ssl_ca_certs": tls.client_ca,
        "ssl_cert_reqs": required,
    }


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: protos.rpc.server handles signals for the whole process."""
        yield


class _Connection(H11Protocol):
    """A connection that is closed if a request arrives too slowly or a response is not read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._request, self._reader = _Patience(transport), _Patience(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            log.warning("the dashboard has %d connections; a new one was closed", MAX_CONNECTIONS)
            transport.abort()
            return
        self._request.start()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Later bytes do not restart the timer, so a request that trickles in is cut off, too.
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._request.start()
        else:
            self._request.stop()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reader.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._request.stop()
        self._reader.stop()
        super().connection_lost(exc)


class _Patience:
    """A timer that closes a connection unless it is stopped; a second start has no effect."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(PATIENCE_SECONDS, self._transport.abort)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

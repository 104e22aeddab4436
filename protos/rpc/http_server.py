"""Serves HTTP with uvicorn on the event loop of the gRPC server, with limits for clients.

uvicorn limits neither the time in which a request arrives, nor the time in which a client reads its
response. This module adds both limits, and a limit on the number of connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from protos.auth.tls import ServerTls
from protos.errors import ErrorCode, Forbidden, InvalidInput
from protos.rpc.transport import is_loopback

# Other error codes have the HTTP status 500.
HTTP_STATUS: Mapping[ErrorCode, int] = {
    ErrorCode.INVALID_ARGUMENT: 400,
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.PERMISSION_DENIED: 403,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.FAILED_PRECONDITION: 409,
    ErrorCode.RESOURCE_EXHAUSTED: 429,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.DEADLINE_EXCEEDED: 504,
}


def require_our_name(host_header: str, host: str, hint: str, external: str = "") -> None:
    """Raise Forbidden for a request with an unknown host name to a server on loopback.

    This prevents DNS rebinding: a page of another site could point its own host name at this
    machine, and read the responses.

    - `host_header`: the Host header of the request
    - `host`: the address at which the server listens; no check if it is not a loopback address
    - `hint`: hint of the error; the refused name replaces NAME
    - `external`: the host name of a proxy, which is accepted, too
    """
    if not is_loopback(host):
        return
    name = host_header.rpartition(":")[0] if not host_header.endswith("]") else host_header
    name = (name or host_header).strip("[]")
    if not is_loopback(name) and (not name or name.lower() != external):
        raise Forbidden(
            f"requests for host {name!r} are refused on loopback", hint=hint.replace("NAME", name)
        )


log = logging.getLogger(__name__)

_MAX_HEADERS_BYTES = 16 << 10


@dataclass(frozen=True)
class HttpLimits:
    """The limits of an HTTP server for its clients. Times are in seconds.

    - `connections`: maximum number of connections; a further connection is closed at once
    - `patience`: maximum time until a whole request has arrived, and maximum time in which a client
      reads nothing of a response
    - `idle`: maximum time between a response and the next request on the same connection
    - `grace`: time for running responses to finish after the server has begun to stop
    """

    connections: int = 256
    patience: float = 10.0
    idle: float = 5.0
    grace: float = 3.0


def bind(host: str, port: int, option: str) -> socket.socket:
    """Return a listening socket. Port 0 means any free port.

    Raises InvalidInput if the address cannot be used. `option`: the command-line option that the
    error names.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise InvalidInput(
            f"cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}",
            field=option,
            hint="choose another port, or 0 for any free port",
        ) from error


@contextlib.asynccontextmanager
async def listening(
    app: ASGIApp, sock: socket.socket, tls: ServerTls | None, limits: HttpLimits
) -> AsyncIterator[Callable[[], None]]:
    """Serve `app` on the socket during the block.

    Yields a function that begins the shutdown: the server then accepts no new request. After the
    block, running responses have `limits.grace` seconds to finish.
    """
    connection: Any = partial(_Connection, limits=limits)
    config = uvicorn.Config(
        app,
        http=connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=_MAX_HEADERS_BYTES,
        timeout_keep_alive=limits.idle,  # type: ignore[arg-type]
        timeout_graceful_shutdown=limits.grace,  # type: ignore[arg-type]
    )
    config.load()
    config.ssl = None if tls is None else tls.http_context()
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[sock]))

    def stop() -> None:
        server.should_exit = True

    try:
        yield stop
    finally:
        stop()
        await task


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: protos.rpc.server handles the signals of this process."""
        yield


class _Connection(H11Protocol):
    """An HTTP connection with time limits.

    It is closed if a request arrives too slowly, or if the client does not read a response.
    """

    def __init__(self, *arguments: Any, limits: HttpLimits, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._request = _Patience(transport, self._limits.patience)
        self._reader = _Patience(transport, self._limits.patience)
        if len(self.connections) > self._limits.connections:
            log.warning("%d HTTP connections; a new one was closed", self._limits.connections)
            transport.abort()
            return
        self._request.start()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Later bytes do not restart the timer, so a request that arrives slowly also times out.
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
    """A timer. `start` sets it to close the connection after some seconds, and `stop` cancels this.

    A call of `start` while the timer runs has no effect.
    """

    def __init__(self, transport: asyncio.Transport, seconds: float) -> None:
        self._transport = transport
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._seconds, self._transport.abort)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

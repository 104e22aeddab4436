"""Serves the HTTP application on the event loop of the gRPC server."""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from protos.rpc.http_server import HttpLimits, bind, listening
from protos.rpc.server import ServerEndpoint, require_free_port
from teacher_service.http.app import HttpTeacher, make_app
from teacher_service.http.faults import fault_answer
from teacher_service.http.gate import TokenGate
from teacher_service.models.load_progress import LoadProgress
from teacher_service.serving.loading import build_loading_error

HTTP_PORT_OPTION = "--http-port"
# An eighth of the file descriptors: gRPC may take three quarters, see protos/rpc/server.py.
_CONNECTIONS = min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
# Trainers pause between two steps, and a busy trainer takes a while to read an answer.
LIMITS = HttpLimits(connections=_CONNECTIONS, patience=60.0, idle=75.0, grace=30.0)


class LoadingApp:
    """The application from the start of the process on (ASGI).

    Until `set_teacher` is called, every request, including `/health`, gets status 503 with the
    progress of the load.
    """

    def __init__(self, progress: LoadProgress) -> None:
        self._progress = progress
        self._app: ASGIApp | None = None

    def set_teacher(self, teacher: HttpTeacher) -> None:
        """Pass all requests to the pages of `teacher` from now on."""
        self._app = make_app(teacher)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the teacher's pages, or answer with status 503 while it loads."""
        app = self._app or fault_answer(build_loading_error(self._progress))
        await app(scope, receive, send)


@dataclass(frozen=True)
class HttpFront:
    """The settings of the HTTP API: its port, 0 for any free port.

    The HTTP API uses the address, tokens and TLS files of the gRPC port.
    """

    port: int
    limits: HttpLimits = LIMITS

    def require_usable(self, endpoint: ServerEndpoint) -> None:
        """Raise InvalidInput if the port is taken, before minutes are spent on loading a model."""
        if self.port:
            require_free_port(endpoint.host, self.port, HTTP_PORT_OPTION)

    @asynccontextmanager
    async def serving(
        self, app: LoadingApp, endpoint: ServerEndpoint
    ) -> AsyncIterator[tuple[str, Callable[[], None]]]:
        """Serve within the block. Yields the URL, and a function that stops accepting requests.

        Leaving the block gives running requests `limits.grace` seconds. Raises InvalidInput if the
        port is taken.
        """
        gate = TokenGate(app, endpoint.tokens, endpoint.host)
        with bind(endpoint.host, self.port, HTTP_PORT_OPTION) as sock:
            async with listening(gate, sock, endpoint.tls, self.limits) as stop:
                host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
                scheme = "https" if endpoint.tls else "http"
                yield f"{scheme}://{host}:{sock.getsockname()[1]}", stop

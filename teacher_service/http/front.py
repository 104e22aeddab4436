"""Serves the HTTP application beside the gRPC server, on the same event loop."""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from protos.auth.tls import TlsFiles
from protos.rpc.http_server import HttpLimits, bind, listening
from protos.rpc.server import ServerEndpoint, require_free_port
from teacher_service.http.app import Teacher, make_app

HTTP_PORT_OPTION = "--http-port"
# An eighth of the file descriptors: gRPC may take three quarters, see protos/rpc/server.py.
_CONNECTIONS = min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
# Trainers pause between two steps, and a busy one takes a while to read an answer.
LIMITS = HttpLimits(connections=_CONNECTIONS, patience=60.0, idle=75.0, grace=30.0)


@dataclass(frozen=True)
class HttpFront:
    """The settings of the front: its port, 0 for any free one, and the TLS files.

    Address and tokens are those of the gRPC port; so are the TLS files.
    """

    port: int
    tls: TlsFiles
    limits: HttpLimits = LIMITS

    def require_usable(self, endpoint: ServerEndpoint) -> None:
        """Raise InvalidInput if the port is taken, before minutes are spent on loading a model."""
        if self.port:
            require_free_port(endpoint.host, self.port, HTTP_PORT_OPTION)

    @asynccontextmanager
    async def serving(
        self, teacher: Teacher, endpoint: ServerEndpoint
    ) -> AsyncIterator[tuple[str, Callable[[], None]]]:
        """Serve within the block. Yields the URL, and a function that lets no request in any more.

        Leaving the block gives running requests `limits.grace` seconds. Raises InvalidInput if the
        port is taken.
        """
        app = make_app(teacher, endpoint.tokens, endpoint.host)
        with bind(endpoint.host, self.port, HTTP_PORT_OPTION) as sock:
            async with listening(app, sock, self.tls, self.limits) as stop:
                host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
                scheme = "https" if endpoint.tls else "http"
                yield f"{scheme}://{host}:{sock.getsockname()[1]}", stop

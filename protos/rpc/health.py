"""The standard health service (grpc.health.v1), as an asyncio servicer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.errors import NotFound

_Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Report SERVING until `stop` is called, then NOT_SERVING.

    After `stop` every Watch call sends NOT_SERVING and ends: an open call would delay the server's
    shutdown. All methods must run on the event loop of the server.
    """

    def __init__(self, service: str) -> None:
        self._services = ("", service)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Report NOT_SERVING from now on, and end all Watch calls."""
        self._stopping.set()

    async def Check(self, request: Any, context: object) -> Any:
        """Return the status of a service; raises NotFound for a name that this server lacks."""
        if request.service not in self._services:
            raise NotFound(f"this server has no service {request.service[:100]!r}", field="service")
        return _Status(status=self._status())

    async def Watch(self, request: Any, context: object) -> AsyncIterator[Any]:
        """Stream the status of a service at once and when it changes, until `stop`."""
        if request.service not in self._services:
            yield _Status(status=_Status.SERVICE_UNKNOWN)
        elif not self._stopping.is_set():
            yield _Status(status=_Status.SERVING)
        await self._stopping.wait()
        yield _Status(status=_Status.NOT_SERVING)

    def _status(self) -> Any:
        return _Status.NOT_SERVING if self._stopping.is_set() else _Status.SERVING

"""Whether a server takes calls, for whoever asks once or watches: grpc.health.v1."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.errors import NotFound

_Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Serving until `stop`. Then every watcher is told so, and its call ends: one that went on
    would keep the server from its end.
    """

    def __init__(self, service: str) -> None:
        self._services = ("", service)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """No new calls from here on."""
        self._stopping.set()

    async def Check(self, request: Any, context: object) -> Any:
        if request.service not in self._services:
            raise NotFound(f"there is no service {request.service[:100]!r} here", field="service")
        return _Status(status=self._status())

    async def Watch(self, request: Any, context: object) -> AsyncIterator[Any]:
        if request.service not in self._services:
            yield _Status(status=_Status.SERVICE_UNKNOWN)
        elif not self._stopping.is_set():
            yield _Status(status=_Status.SERVING)
        await self._stopping.wait()
        yield _Status(status=_Status.NOT_SERVING)

    def _status(self) -> Any:
        return _Status.NOT_SERVING if self._stopping.is_set() else _Status.SERVING

"""The standard health service (grpc.health.v1), and a health check for containers.

    python -P -m protos.rpc.health ADDRESS

ADDRESS is HOST:PORT or https://HOST:PORT. The exit code is 0 if the server there is serving, else
1.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.errors import DistillError, NotFound
from protos.rpc.channel import SERVER_TOKEN, open_channel

_Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The health service of a server. Its status is SERVING from `start` to `stop`, else
    NOT_SERVING.

    After `stop`, every Watch call sends NOT_SERVING and ends, because an open call would delay the
    shutdown of the server. All methods must run on the event loop of the server.
    """

    def __init__(self, service: str) -> None:
        self._services = ("", service)
        self._started = asyncio.Event()
        self._stopping = asyncio.Event()

    def start(self) -> None:
        """Report SERVING from now on."""
        self._started.set()

    def stop(self) -> None:
        """Report NOT_SERVING from now on, and end all Watch calls."""
        self._stopping.set()
        self._started.set()  # a Watch call may wait for the start

    async def Check(self, request: Any, context: object) -> Any:
        """Return the status of a service.

        Raises NotFound if this server has no service of this name.
        """
        if request.service not in self._services:
            raise NotFound(f"this server has no service {request.service[:100]!r}", field="service")
        return _Status(status=self._current_status())

    async def Watch(self, request: Any, context: object) -> AsyncIterator[Any]:
        """Send the status of a service now, and again after each change, until `stop`."""
        if request.service not in self._services:
            yield _Status(status=_Status.SERVICE_UNKNOWN)
            await self._stopping.wait()
            yield _Status(status=_Status.NOT_SERVING)
            return
        sent_status = self._current_status()
        yield _Status(status=sent_status)
        for change in (self._started, self._stopping):
            await change.wait()
            if self._current_status() != sent_status:
                sent_status = self._current_status()
                yield _Status(status=sent_status)

    def _current_status(self) -> Any:
        serving = self._started.is_set() and not self._stopping.is_set()
        return _Status.SERVING if serving else _Status.NOT_SERVING


def is_serving(address: str, *, seconds: float = 5.0) -> bool:
    """Return True if the server at `address` reports SERVING within `seconds`.

    `address` is HOST:PORT, or https://HOST:PORT with the authority of $DISTILL_TLS_CA. Raises
    InvalidInput if the address has no port or an unknown scheme, or if a TLS file cannot be read.
    """
    with open_channel(address, token=SERVER_TOKEN) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=seconds)
        except grpc.RpcError:
            return False
        return bool(reply.status == _Status.SERVING)


def main() -> None:
    """Check the server at the address that is the only argument of this program."""
    (address,) = sys.argv[1:]
    try:
        serving = is_serving(address)
    except DistillError as error:
        sys.exit(f"error: {error}")
    if not serving:
        sys.exit(f"{address} is not serving")


if __name__ == "__main__":
    main()

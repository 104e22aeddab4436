"""A TCP proxy that injects network faults into connections, in its own thread."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

_READ_BYTES = 64 << 10


@dataclass(frozen=True)
class Toxics:
    """The faults, in both directions; none by default.

    latency_seconds and jitter_seconds: each piece is delayed by latency plus or minus jitter.
    bytes_per_second: of one direction of one connection.
    slice_bytes: pieces are cut to at most so many bytes.
    reset_after_bytes: a connection is reset (RST) after so many bytes.
    timeout_seconds: a connection is closed after this time.
    blackhole: data is dropped silently.
    silent: data, ends and resets of connections are held back until this is over.
    """

    latency_seconds: float = 0.0
    jitter_seconds: float = 0.0
    bytes_per_second: float | None = None
    slice_bytes: int = _READ_BYTES
    reset_after_bytes: int | None = None
    timeout_seconds: float | None = None
    blackhole: bool = False
    silent: bool = False


class FaultProxy:
    """Listens on a free port of loopback and forwards to `target` (HOST:PORT).

    `toxics` may be replaced at any time and applies at once, also to open connections. `target` may
    be replaced too, and applies to new connections.
    """

    def __init__(self, target: str, toxics: Toxics = Toxics()) -> None:
        self.target = target
        self.toxics = toxics
        self.connections = 0
        self.carried_bytes = 0  # in both directions
        self.resets = 0
        self.random = random.Random(0)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        starting = asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(10)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def reset_connections(self) -> None:
        """Reset all open connections."""
        self._loop.call_soon_threadsafe(self._cancel_tasks)

    async def wait_while_silent(self) -> None:
        """Wait while the network is silent."""
        while self.toxics.silent:
            await asyncio.sleep(0.05)

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _close(self) -> None:
        self.toxics = Toxics()
        self._server.close()
        self._cancel_tasks()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = self._loop.create_task(self._serve(_Connection(self, reader, writer)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: _Connection) -> None:
        try:
            with suppress(OSError, TimeoutError):
                await connection.carry()
        finally:
            connection.abort()


class _Connection:
    """One connection of a client, and the proxy's connection to the target."""

    def __init__(
        self, proxy: FaultProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._proxy = proxy
        self._client = (reader, writer)
        self._writers = [writer]
        self._carried_bytes = 0

    async def carry(self) -> None:
        await self._proxy.wait_while_silent()
        host, _, port = self._proxy.target.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        self._writers.append(writer)
        async with asyncio.timeout(self._proxy.toxics.timeout_seconds):
            pumps = [
                asyncio.create_task(self._pump(self._client[0], writer)),
                asyncio.create_task(self._pump(reader, self._client[1])),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in pumps:
                    task.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)

    def abort(self) -> None:
        for writer in self._writers:
            linger = struct.pack("ii", 1, 0)  # sends RST instead of FIN
            with suppress(OSError):
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction until its end or a reset, with the proxy's toxics."""
        try:
            await self._forward(reader, writer)
        finally:
            await self._proxy.wait_while_silent()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while data := await reader.read(min(_READ_BYTES, self._proxy.toxics.slice_bytes)):
            await self._proxy.wait_while_silent()
            toxics = self._proxy.toxics
            if toxics.blackhole:
                continue
            if toxics.bytes_per_second:
                await asyncio.sleep(len(data) / toxics.bytes_per_second)
            jitter = self._proxy.random.uniform(-1, 1) * toxics.jitter_seconds
            # Pieces keep their order.
            due = max(due + 1e-6, loop.time() + toxics.latency_seconds + jitter)
            loop.call_at(due, self._write, writer, data)
            await writer.drain()
            self._carried_bytes += len(data)
            self._proxy.carried_bytes += len(data)
            if toxics.reset_after_bytes and self._carried_bytes >= toxics.reset_after_bytes:
                self._proxy.resets += 1
                return

    @staticmethod
    def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
        if not writer.is_closing():
            writer.write(data)

"""A real Redis server for tests: on any free port of loopback, nothing kept, killed at the end."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import redis

from benchmarks.shared.redis_process import redis_binary
from protos.rpc.ports import free_ports
from teacher_service.cache.redis_address import OPTIONS


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where time is not the subject: a busy machine may take longer than 200 ms."""
    monkeypatch.setattr("teacher_service.cache.redis_tier.TIMEOUT_SECONDS", 20.0)
    monkeypatch.setitem(OPTIONS, "socket_timeout", 20.0)
    monkeypatch.setitem(OPTIONS, "socket_connect_timeout", 20.0)


class RedisServer:
    """Ready when the constructor returns."""

    def __init__(self, directory: Path, *args: str) -> None:
        (self.port,) = free_ports(1)
        self._command = [
            *(redis_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""),
            *("--dir", str(directory), "--logfile", str(directory / "redis.log"), *args),
        ]
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"redis://{self.address}/0"

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                break
            except OSError:
                assert self.process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)

    def client(self, **options: Any) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=10, **options)

    def do(self, *command: Any) -> Any:
        """One command of an administrator."""
        with self.client() as client:
            return client.execute_command(*command)

    def send(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

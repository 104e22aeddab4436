"""S10: connections that send nothing, and connections that are reset at once."""

from __future__ import annotations

import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.security.processes import Program, server, teacher

DESCRIPTORS = 256
HALF_OPEN = 1000
RESETS = 5000
RECOVERY_SECONDS = 5.0
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def limit_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


@pytest.fixture(autouse=True)
def many_sockets() -> Iterator[None]:
    """Raise the limit of descriptors of this process, which is the attacker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = HALF_OPEN + 200
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"at most {hard} descriptors here, {needed} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def seconds_to_answer(program: Program) -> float:
    """Return the seconds from a new connection to its first answer."""
    start_time = time.monotonic()
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 500)]
    with grpc.insecure_channel(program.address, options=options) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        health.Check(health_pb2.HealthCheckRequest(), timeout=30, wait_for_ready=True)
    return time.monotonic() - start_time


def connect(program: Program, stack: ExitStack) -> socket.socket:
    connection = stack.enter_context(socket.socket())
    connection.settimeout(1.0)
    host, _, port = program.address.rpartition(":")
    connection.connect((host, int(port)))
    return connection


@pytest.mark.parametrize("service", ["server", "teacher"])
def test_silent_and_broken_connections(service: str, tmp_path: Path) -> None:
    program_context = (
        server(tmp_path / "runs", before=limit_descriptors)
        if service == "server"
        else teacher(tmp_path / "log", before=limit_descriptors)
    )
    with program_context as program:
        process = psutil.Process(program.process.pid)
        seconds_to_answer(program)
        idle_count = process.num_fds()
        with ExitStack() as stack:
            for _ in range(HALF_OPEN):
                connect(program, stack)
            time.sleep(0.5)
            held_count = process.num_fds()
            # Some descriptors remain for files during the attack.
            assert held_count < DESCRIPTORS - 32
        after_silence = seconds_to_answer(program)
        for _ in range(RESETS):
            with ExitStack() as stack:
                connect(program, stack).setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE
                )
        after_resets = seconds_to_answer(program)
        assert program.process.poll() is None
        deadline = time.monotonic() + 12  # more than the timeout of a handshake
        while (open_count := process.num_fds()) > idle_count + 5 and time.monotonic() < deadline:
            time.sleep(0.1)
    print(
        f"\n{HALF_OPEN} half-open: {held_count} descriptors held of {DESCRIPTORS}, answers after"
        f" {after_silence:.2f} s; {RESETS} resets: after {after_resets:.2f} s;"
        f" {open_count - idle_count:+d} descriptors"
    )
    assert max(after_silence, after_resets) < RECOVERY_SECONDS
    assert open_count <= idle_count + 5

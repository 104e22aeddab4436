"""Real servers on free ports, whose trainers are scripted."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from clients.config.on_policy import OnPolicyJob
from clients.config.tables.common import StudentConfig
from clients.config.tables.data import DataConfig
from clients.jobs.client import DistillClient
from distill_server.runners.local.process import claim, identity_of, kill_family
from tests.forked_python import ForkedPython

_COUNTER = itertools.count()
SCRIPTED = [sys.executable, "-m", "tests.distill_server.scripted_server"]


def job_config(name: str = "test", max_steps: int = 5) -> OnPolicyJob:
    return OnPolicyJob(
        student=StudentConfig(model="tiny"),
        data=DataConfig(path="prompts.jsonl"),
        name=name,
        max_steps=max_steps,
    )


class Server:
    """A server process that can be killed and started again on the same port and directory."""

    def __init__(self, runs: Path, slots: int = 1, **options: object) -> None:
        """`options`: of scripted_server.py. Its process is forked, see tests/forked_python.py."""
        self.runs = runs
        self.slots = slots
        self.options = options
        # A separate address: no other process takes its port between a kill and the next start.
        self.host = f"127.{os.getpid() >> 8 & 127}.{os.getpid() & 255}.{next(_COUNTER) % 254 + 1}"
        self.port = 0
        self.process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self) -> None:
        if self.port:
            # Starting a real program takes longer. By then its clients have noticed the death, and
            # the shim that the server was about to start is running.
            time.sleep(0.3)
        self.process = self.launch()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("server listening on"), line
        self.port = int(line.rsplit(":", 1)[1])

    def launch(self) -> subprocess.Popen[str]:
        arguments = [str(self.runs), self.host, str(self.port), str(self.slots)]
        arguments.append(json.dumps(self.options))
        return ForkedPython([*SCRIPTED, *arguments], stdout=subprocess.PIPE, text=True)

    def kill(self, signum: int = signal.SIGKILL) -> int:
        self.send_signal(signum)
        return self.wait()

    def send_signal(self, signum: int) -> None:
        assert self.process is not None
        self.process.send_signal(signum)

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        assert self.process is not None
        assert self.process.stdout is not None
        code = self.process.wait(200)
        self.process.stdout.close()
        self.process = None
        return code

    def clean_up(self) -> None:
        if self.process is not None:
            self.kill()
        for kind in ("*", ".teachers/*"):
            for directory in self.runs.glob(f"{kind}/logs/attempt-*"):
                end_attempt(directory)

    def card(self, job_id: str, attempt: int = 1) -> dict[str, int]:
        """Wait for the attempt's shim.json and return its content."""
        path = self.runs / job_id / "logs" / f"attempt-{attempt}" / "shim.json"
        eventually(path.exists)
        card: dict[str, int] = json.loads(path.read_text())
        return card


def end_attempt(directory: Path) -> None:
    """Kill all processes of an attempt, even one that is just starting."""
    card = directory / "shim.json"
    if claim(directory):
        return
    # If a server found no shim and took the claim itself, there is nothing to wait for.
    eventually(
        lambda: card.exists() or (directory / "exit.json").exists() or not has_shim(directory)
    )
    if card.exists():
        shim_record = json.loads(card.read_text())
        shim = identity_of(shim_record["pid"])
        if shim is not None and shim.start_time == shim_record["start_time"]:
            os.kill(shim.pid, signal.SIGKILL)
        kill_family(shim_record["mark"])


def has_shim(directory: Path) -> bool:
    """Whether a process has the attempt's log on its command line."""
    lines = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return any(str(directory / "rank-0.log") in line for line in lines)


def eventually(condition: Callable[[], object], seconds: float = 60.0, pause: float = 0.02) -> None:
    """Wait until the condition is true; the limit is long for machines that are very busy."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(pause)


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(slots: int = 1, **options: object) -> Server:
        server = Server(tmp_path / "runs", slots, **options)
        servers.append(server)
        server.start()
        return server

    yield make
    for server in servers:
        server.clean_up()


@pytest.fixture
def server(make_server: Callable[..., Server]) -> Server:
    return make_server()


@pytest.fixture
def client(server: Server) -> Iterator[DistillClient]:
    with DistillClient(server.address) as client:
        yield client

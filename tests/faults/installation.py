"""The installation for `chaos.py`: a server, two teachers and a Redis, all supervised."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.shared.redis_process import redis_binary
from distill_server.runners.local.process import MARK
from protos.rpc.ports import free_ports
from tests.small_disk import mount, unmount

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

SLOTS = 3
# A trainer is killed every half minute, so some are killed several times without a new step.
RETRIES = 20
DISK_SIZE = "32m"


class Service:
    """A process that is restarted one second after it has ended, except during `away`."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name, self._command, self._log = name, list(command), log
        self._hold, self._closed = threading.Event(), False
        self.starts = 0
        self.process = self._start()
        self._thread = threading.Thread(target=self._supervise, daemon=True)
        self._thread.start()

    def away(self, seconds: float) -> None:
        """Kill the process and restart it only after `seconds`."""
        self._hold.set()
        self.process.kill()
        time.sleep(seconds)
        self._hold.clear()

    def close(self) -> None:
        self._closed = True
        self._thread.join()
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)

    def _supervise(self) -> None:
        while not self._closed:
            if self.process.poll() is not None and not self._hold.is_set():
                time.sleep(1.0)
                self.process = self._start()
            time.sleep(0.1)


@dataclass
class Installation:
    """The directories, addresses and services of the installation."""

    root: Path
    runs: Path
    disk: Path
    server: Service
    teachers: list[Service]
    redis: Service
    address: str
    teacher_addresses: list[str]
    hung: subprocess.Popen[bytes] | None

    def trainers(self) -> list[psutil.Process]:
        """Return every process of every attempt, including the shims."""
        processes = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                line = process.cmdline()
                is_in_runs = any(str(self.runs) in word for word in line)
                if is_in_runs and (
                    MARK in process.environ() or any("shim" in word for word in line)
                ):
                    processes.append(process)
        return processes


@contextmanager
def run_installation(root: Path, material: Material) -> Iterator[Installation]:
    """Run all services within the block and kill them at its end."""
    with ExitStack() as stack:
        disk, runs, backing_directory = root / "disk", root / "runs", root / "behind"
        for directory in (disk, runs, backing_directory):
            directory.mkdir()
        mount(disk, DISK_SIZE)
        stack.callback(unmount, disk)
        hung = None
        if shutil.which("bindfs"):
            hung = subprocess.Popen(["bindfs", "-f", str(backing_directory), str(runs)])
            stack.callback(_unmount_hung, hung, runs)
            until(lambda: os.path.ismount(runs) or hung.poll() is not None)
            hung = hung if os.path.ismount(runs) else None
        server_port, redis_port, *teacher_ports = free_ports(4)

        def service(name: str, *command: str) -> Service:
            new_service = Service(name, command, root / f"{name}.log")
            stack.callback(new_service.close)
            return new_service

        python = [sys.executable, "-m"]
        redis = service(
            "redis", redis_binary(), "--port", str(redis_port), "--save", "", "--dir", str(root)
        )
        teachers = [
            service(
                f"teacher{number}",
                *(*python, "teacher_service", "--model", str(material.teacher)),
                *("--batch-invariant", "--redis-url", f"redis://127.0.0.1:{redis_port}/0"),
                *("--cache-dir", str(root / f"cache{number}"), "--port", str(port)),
            )
            for number, port in enumerate(teacher_ports, 1)
        ]
        server = service(
            "server",
            *(*python, "distill_server", "--runs", str(runs), "--port", str(server_port)),
            *("--database", str(disk / "server.db"), "--slots", str(SLOTS)),
            *("--threads-per-job", "1", "--backoff", "0.5", "--retries", str(RETRIES)),
        )
        addresses = [f"127.0.0.1:{port}" for port in teacher_ports]
        yield Installation(
            *(root, runs, disk, server, teachers, redis),
            *(f"127.0.0.1:{server_port}", addresses, hung),
        )


def _unmount_hung(process: subprocess.Popen[bytes], directory: Path) -> None:
    process.send_signal(signal.SIGCONT)
    with suppress(subprocess.CalledProcessError):  # never mounted
        unmount(directory)
    process.terminate()
    process.wait()


def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)

"""The installation for `chaos.py`: supervised services, and an S3 server in its own process.

Trainers reach teachers, rollout engines and S3 through proxies.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from benchmarks.shared.redis_process import redis_binary
from distill_server.runners.local.process import MARK
from protos.rpc.ports import free_ports
from tests.faults.proxy import FaultProxy
from tests.small_disk import mount, unmount

if TYPE_CHECKING:
    from tests.object_storage import S3Server
    from tests.student_trainer.tiny import Material

SLOTS = 3
# A trainer is killed every half minute, so some are killed several times without a new step.
RETRIES = 20
DISK_SIZE = "32m"
# The seconds that a server waits for checkpoints, and that it may need besides on a busy machine.
STOP_GRACE, STOP_SECONDS = 60.0, 300.0

# Of Debian's package faketime. The times of files stay, and so do the intervals of timers.
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
FAKETIME_OPTIONS = {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1"}

S = TypeVar("S", bound="Service")


class Service:
    """A process that is restarted one second after it has ended, except during `away`."""

    def __init__(
        self, name: str, command: Sequence[str], root: Path, environment: Mapping[str, str] = {}
    ) -> None:
        self.name, self._command, self._log = name, list(command), root / f"{name}.log"
        self._environment = dict(environment)
        self._hold, self._closed = threading.Event(), False
        self._lock = threading.Lock()  # held while the process is started
        self.starts = 0
        self.process = self._start()
        self._thread = threading.Thread(target=self._supervise, daemon=True)
        self._thread.start()

    @property
    def kind(self) -> str:
        """The name without its number."""
        return self.name.rstrip("12")

    def away(self, seconds: float) -> None:
        """Kill the process and restart it only after `seconds`."""
        self._hold.set()
        self.process.kill()
        time.sleep(seconds)
        self._hold.clear()

    def restart(self, arguments: Sequence[str] = (), environment: Mapping[str, str] = {}) -> None:
        """End the process; the next ones get other last arguments and further variables."""
        with self._lock:
            self._command[len(self._command) - len(arguments) :] = arguments
            self._environment |= environment
            self.process.terminate()

    def close(self) -> None:
        self._closed = True
        self._thread.join()
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self._environment}
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)

    def _supervise(self) -> None:
        while not self._closed:
            if self.process.poll() is not None and not self._hold.is_set():
                time.sleep(1.0)
                with self._lock:
                    self.process = self._start()
            time.sleep(0.1)


class Replica(Service):
    """A service behind an address that it keeps when it moves, as behind a Kubernetes Service."""

    def __init__(self, name: str, command: Sequence[str], root: Path) -> None:
        (port,) = free_ports(1)
        self.proxy = FaultProxy(f"127.0.0.1:{port}")
        self.address = self.proxy.address
        super().__init__(name, [*command, "--port", str(port)], root)

    def move(self) -> None:
        """End the process, and start the next one at another port."""
        (port,) = free_ports(1)
        self.proxy.target = f"127.0.0.1:{port}"
        self.restart(["--port", str(port)])

    def close(self) -> None:
        super().close()
        self.proxy.close()


class Storage:
    """An S3 server behind a proxy."""

    def __init__(self, root: Path) -> None:
        """Raises ImportError without moto."""
        from tests.object_storage import BUCKET, S3Server

        logging.getLogger("werkzeug").setLevel(logging.WARNING)  # of each request
        self.server: S3Server = S3Server()
        self.proxy = FaultProxy(self.server.address.removeprefix("http://"))
        self.url = f"s3://{BUCKET}/runs"
        keys = root / "keys"
        keys.write_text("[default]\naws_access_key_id = test\naws_secret_access_key = test\n")
        # A server does not pass AWS_ACCESS_KEY_ID to its trainers.
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://{self.proxy.address}",
            "AWS_SHARED_CREDENTIALS_FILE": str(keys),
        }

    def close(self) -> None:
        self.proxy.close()
        self.server.stop()


@dataclass
class Installation:
    """The directories, addresses and services of the installation."""

    root: Path
    runs: Path
    disk: Path
    server: Service
    teachers: list[Replica]
    engines: list[Replica]
    redis: Service
    address: str
    storage: Storage | None
    hung: subprocess.Popen[bytes] | None

    @property
    def replicas(self) -> list[Replica]:
        """The services that trainers reach through proxies."""
        return [*self.teachers, *self.engines]

    def move_clock(self, seconds: int) -> None:
        """End the server; the next ones have a clock that differs from the trainers' clock.

        The server does not pass the variables to its trainers.
        """
        assert FAKETIME is not None
        variables = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": f"{seconds:+d}s", **FAKETIME_OPTIONS}
        self.server.restart(environment=variables)

    def stop_server(self, on_stop: str) -> int:
        """End the server, and return its exit code; the next ones have this `--on-stop`."""
        process = self.server.process
        self.server.restart(["--on-stop", on_stop])
        code = process.wait(STOP_GRACE + STOP_SECONDS)
        until(lambda: self.server.process is not process)
        return code

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
        server_port, redis_port = free_ports(2)
        storage = None
        with suppress(ImportError):
            storage = Storage(root)
            stack.callback(storage.close)

        def keep(service: S) -> S:
            stack.callback(service.close)
            return service

        python = [sys.executable, "-m"]
        redis_command = [redis_binary(), "--port", str(redis_port), "--save", ""]
        redis = keep(Service("redis", [*redis_command, "--dir", str(root)], root))
        teacher_command = [
            *(*python, "teacher_service", "--model", str(material.teacher)),
            *("--batch-invariant", "--redis-url", f"redis://127.0.0.1:{redis_port}/0"),
        ]
        teachers = [
            keep(Replica(name, [*teacher_command, "--cache-dir", str(root / name)], root))
            for name in ("teacher1", "teacher2")
        ]
        server_command = [
            *(*python, "distill_server", "--runs", str(runs), "--port", str(server_port)),
            *("--database", str(disk / "server.db"), "--slots", str(SLOTS)),
            *("--threads-per-job", "1", "--backoff", "0.5", "--retries", str(RETRIES)),
            *("--stop-grace", str(STOP_GRACE), "--on-stop", "leave"),
        ]
        environment = {} if storage is None else storage.environment
        server = keep(Service("server", server_command, root, environment))
        engine_command = [*python, "student_trainer.rollout_service"]
        engine_command += ["--model", str(material.student)]
        engines = [keep(Replica(name, engine_command, root)) for name in ("engine1", "engine2")]
        yield Installation(
            *(root, runs, disk, server, teachers, engines, redis),
            *(f"127.0.0.1:{server_port}", storage, hung),
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

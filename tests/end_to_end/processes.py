"""Real trainers and real servers of this machine."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from clients.config.kinds import AnyJob
from clients.runs.directory import RunDirectory
from clients.runs.launch import trainer_command
from tests.distill_server.conftest import Server
from tests.forked_python import ForkedPython

# A warning in a child process is an error, as in this process.
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "error",
    # Tests do not use the network: hub names cannot be found.
    "HF_ENDPOINT": "http://127.0.0.1:1",
}


class Attempt(ABC):
    """One attempt at a run, by one or several processes."""

    def __init__(self, run: RunDirectory, number: int) -> None:
        self.run, self.number = run, number
        run.logs(number).mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def poll(self) -> int | None:
        """Return the exit code, minus the signal if one ended it, or None while it runs."""

    @abstractmethod
    def wait(self) -> int: ...

    @abstractmethod
    def kill(self) -> None:
        """Kill every process of the attempt, as a machine that runs out of memory would."""

    def wait_for_step(self, step: int, seconds: float = 240) -> None:
        """Wait until this attempt has written a metrics line of `step` or a later one."""
        deadline = time.monotonic() + seconds
        while not any(
            line["attempt"] == self.number and line["step"] >= step
            for line in metrics_of(self.run)[-1:]
        ):
            assert self.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.002)

    @property
    def log(self) -> str:
        return self.run.log_file(self.number).read_text()


class Launched(Attempt):
    """An attempt started by the command that `distill run` and the server use."""

    def __init__(self, run: RunDirectory, number: int) -> None:
        super().__init__(run, number)
        processes = run.config().processes
        with run.log_file(number).open("ab") as log:
            self._process = subprocess.Popen(
                trainer_command(run.path, attempt=number, processes=processes),
                stdout=log,
                stderr=log,
                env=ENVIRONMENT,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self) -> int:
        return self._process.wait(120)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(20)


def new_run(path: Path, config: AnyJob) -> RunDirectory:
    return RunDirectory.create(path, config)


def metrics_of(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl."""
    try:
        text = run.metrics.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def weights(run: RunDirectory) -> str:
    return hashlib.sha256((run.export / "model.safetensors").read_bytes()).hexdigest()


class RealServer(Server):
    """`distill-server` in a forked process, which launches real trainers.

    Its option `arguments` is a list of further command line arguments.
    """

    def launch(self) -> subprocess.Popen[str]:
        address_options = ["--runs", str(self.runs), "--host", self.host, "--port", str(self.port)]
        options = ["--slots", str(self.slots), "--threads-per-job", "1"]
        options += ["--retries", "1", "--backoff", "0.5", *self.options.get("arguments", [])]
        return ForkedPython(
            [sys.executable, "-m", "distill_server", *address_options, *options],
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )


MakeServer = Callable[..., RealServer]

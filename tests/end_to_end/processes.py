"""Real trainers and real servers of this machine."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from clients.job_kinds import AnyJob, processes_of
from clients.launch import trainer_command
from clients.run_directory import RunDirectory
from tests.server.conftest import Server

# A warning in one of our processes is an error there, as it is in this one.
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "error",
    # No test asks the network: a hub name is one that cannot be found.
    "HF_ENDPOINT": "http://127.0.0.1:1",
}


class TrainerProcess:
    """One attempt at a run: by default, the command that `distill run` and the server use."""

    def __init__(
        self,
        run: RunDirectory,
        attempt: int,
        *,
        command: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        self.run, self.attempt = run, attempt
        run.logs(attempt).mkdir(parents=True, exist_ok=True)
        default = trainer_command(
            run.path, attempt=attempt, processes=processes_of(run.config()), **options
        )
        with run.log_file(attempt).open("ab") as log:
            self.process = subprocess.Popen(
                command or default,
                stdout=log,
                stderr=log,
                env=ENVIRONMENT,
                start_new_session=True,
            )

    def wait_for_step(self, step: int) -> None:
        """Until this attempt has written a metrics line of `step` or a later one."""
        deadline = time.monotonic() + 60
        while not any(
            line["attempt"] == self.attempt and line["step"] >= step
            for line in metrics_of(self.run)[-1:]
        ):
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.002)

    def kill(self) -> None:
        """Every process of it, as a machine that runs out of memory would."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)

    def wait(self) -> int:
        return self.process.wait(120)

    @property
    def log(self) -> str:
        return self.run.log_file(self.attempt).read_text()


@contextmanager
def trainer(run: RunDirectory, attempt: int = 1, **options: Any) -> Iterator[TrainerProcess]:
    started = TrainerProcess(run, attempt, **options)
    try:
        yield started
    finally:
        started.kill()


def finish(run: RunDirectory, attempt: int = 1, **options: Any) -> RunDirectory:
    """Train to the end, undisturbed, without a warning."""
    with trainer(run, attempt, **options) as process:
        assert process.wait() == 0, process.log
        assert "Warning" not in process.log
    status = run.read_status()
    assert status is not None
    assert (status.verdict, status.step) == ("succeeded", run.config().max_steps)
    return run


def new_run(path: Path, config: AnyJob) -> RunDirectory:
    return RunDirectory.create(path, config)


def metrics_of(run: RunDirectory) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl."""
    try:
        text = run.metrics.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def weights(run: RunDirectory) -> str:
    return hashlib.sha256((run.export / "model.safetensors").read_bytes()).hexdigest()


class RealServer(Server):
    """`python -m distill_server` with the real trainer."""

    def launch(self) -> subprocess.Popen[str]:
        where = ["--runs", str(self.runs), "--host", self.host, "--port", str(self.port)]
        options = ["--slots", str(self.slots), "--threads-per-job", "1"]
        options += ["--retries", "1", "--backoff", "0.5"]
        return subprocess.Popen(
            [sys.executable, "-m", "distill_server", *where, *options],
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )


MakeServer = Callable[..., RealServer]

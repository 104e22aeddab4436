"""Captures in processes that start at once, see tests/forks.py."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clients.runs.directory import RunDirectory
from protos.rpc import failpoints
from tests.forks import fork


class Child:
    """One attempt at a capture."""

    def __init__(
        self,
        run: RunDirectory,
        number: int,
        *,
        failpoint: str = "",
        file_bytes: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`failpoint="name:kill"`, `file_bytes`: the largest file that it may write."""
        self._log = run.log_file(number)
        argv = [str(run.path), "--attempt", str(number)]
        more = dict(environment or {})
        self._process = fork(_capture, argv, self._log, failpoint, file_bytes, more)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait_for_files(self, store: Path, count: int) -> None:
        """Until so many files of the store are there, in whatever state."""
        deadline = time.monotonic() + 60
        while len(list(store.glob("*.arrow*"))) < count:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.002)

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        """The exit code; minus the signal that ended it."""
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    @property
    def log(self) -> str:
        return self._log.read_text()


@contextmanager
def attempt(run: RunDirectory, number: int = 1, **options: Any) -> Iterator[Child]:
    """`options`: of Child."""
    run.logs(number).mkdir(parents=True, exist_ok=True)
    child = Child(run, number, **options)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def finish(run: RunDirectory, number: int = 1, **options: Any) -> int:
    """Run to the end; the exit code, minus the signal that ended it."""
    with attempt(run, number, **options) as child:
        return child.wait()


def _capture(
    argv: list[str],
    log: Path,
    failpoint: str,
    file_bytes: int | None,
    environment: dict[str, str],
) -> None:
    descriptor = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.update(environment)
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    failpoints.arm(failpoint)
    sys.argv = ["capture", *argv]
    from teacher_service.capture.__main__ import main

    sys.exit(main())

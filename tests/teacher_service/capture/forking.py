"""Captures in processes that start at once: children of one that has imported the libraries.

`python -m tests.teacher_service.capture.forking` reads one JSON object per line, {"argv",
"environment", "log", "file_bytes"}, answers with the pid, and with its wait status when it ends.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clients.runs.directory import RunDirectory


class Forker:
    """The side of the tests."""

    def __init__(self, log: Path) -> None:
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.teacher_service.capture.forking"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        self.log = log
        assert self._line() == "ready", log.read_text()

    @contextmanager
    def attempt(self, run: RunDirectory, number: int = 1, **more: Any) -> Iterator[Child]:
        """`failpoint="name:kill"`, `file_bytes`: the largest file that it may write."""
        run.logs(number).mkdir(parents=True, exist_ok=True)
        asked = {
            "argv": [str(run.path), "--attempt", str(number)],
            "log": str(run.log_file(number)),
            **more,
        }
        assert self.process.stdin
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        child = Child(int(self._line()), self, run, number)
        try:
            yield child
        finally:
            child.kill()
            child.wait()

    def finish(self, run: RunDirectory, number: int = 1, **more: Any) -> int:
        """Run to the end; the exit code, minus the signal that ended it."""
        with self.attempt(run, number, **more) as child:
            return child.wait()

    def close(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()

    def _line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()


class Child:
    def __init__(self, pid: int, forker: Forker, run: RunDirectory, number: int) -> None:
        self.pid = pid
        self._forker = forker
        self._log = run.log_file(number)
        self._code: int | None = None

    def wait_for_files(self, store: Path, count: int) -> None:
        """Until so many files of the store are there, in whatever state."""
        deadline = time.monotonic() + 60
        while len(list(store.glob("*.arrow*"))) < count:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.0005)

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._code is None:
            self._code = int(self._forker._line())
        return self._code

    @property
    def log(self) -> str:
        return self._log.read_text()


def _serve() -> None:
    # All that an attempt loads; an array brings pandas with it.
    import pyarrow.compute
    import pyarrow.ipc
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import teacher_service.capture.program
    import teacher_service.engines.fake
    import teacher_service.engines.hf  # noqa: F401

    pyarrow.array([])
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run(asked)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(asked: dict[str, Any]) -> None:
    """The child: never returns."""
    code = 70
    try:
        log = os.open(asked["log"], os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        if "file_bytes" in asked:
            resource.setrlimit(resource.RLIMIT_FSIZE, (asked["file_bytes"],) * 2)
        if "failpoint" in asked:
            import importlib

            from protos.rpc import failpoints

            os.environ[failpoints.VARIABLE] = asked["failpoint"]
            importlib.reload(failpoints)
            from teacher_service.capture import writer

            writer.failpoint = failpoints.failpoint
        sys.argv = ["capture", *asked["argv"]]
        from teacher_service.capture.__main__ import main

        code = main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()

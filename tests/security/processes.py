"""Real servers and teachers with tokens and certificates."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.forked_python import ForkedPython, run_forked

FAKE_TEACHER = ("--engine", "fake", "--model", "vocab=64", "--no-cache")


def environment(**variables: object) -> dict[str, str]:
    """Return this environment without DISTILL_ variables, plus `variables`."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("DISTILL_")
    }
    return {**inherited, "OMP_NUM_THREADS": "1", **{k: str(v) for k, v in variables.items()}}


class Program:
    """`python -m MODULE ... --port 0`, ready when the constructor returns."""

    def __init__(
        self,
        module: str,
        *arguments: object,
        log: Path,
        variables: Mapping[str, object] | None = None,
        before: Callable[[], None] | None = None,
        launched: bool = False,
    ) -> None:
        """`launched`: start a new interpreter, with its own command line, instead of a forked
        process.
        """
        self.log = log
        with log.open("ab") as stderr:
            self.process = (subprocess.Popen if launched else ForkedPython)(
                [sys.executable, "-m", module, *map(str, arguments), "--port", "0"],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment(**(variables or {})),
                preexec_fn=before,
            )
        self.output: IO[str] = self.process.stdout  # type: ignore[assignment]
        line = self.output.readline()
        if "listening on" not in line:
            self.close()
            raise AssertionError(log.read_text())
        self.address = line.split()[-1]
        self.port = int(self.address.rpartition(":")[2])

    def close(self) -> None:
        self.process.kill()
        self.process.wait(20)
        self.output.close()


@contextmanager
def server(runs: Path, *arguments: object, **options: object) -> Iterator[Program]:
    runs.parent.mkdir(exist_ok=True)
    log = runs.with_suffix(".log")
    program = Program("distill_server", "--runs", runs, *arguments, log=log, **options)  # type: ignore[arg-type]
    try:
        yield program
    finally:
        program.close()


@contextmanager
def teacher(log: Path, *arguments: object, **options: object) -> Iterator[Program]:
    program = Program("teacher_service", *FAKE_TEACHER, *arguments, log=log, **options)  # type: ignore[arg-type]
    try:
        yield program
    finally:
        program.close()


def run_refused(module: str, arguments: Sequence[object], **variables: object) -> str:
    """Run a program that must refuse to start; return its error message."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    process = run_forked(command, env=environment(**variables), timeout=60)
    assert process.returncode == 2, process.stderr
    assert process.stdout == ""
    assert len(process.stderr.splitlines()) == 1, process.stderr
    return process.stderr

"""Processes that a command starts and always stops: their logs, their addresses, their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from protos.errors import InternalFault

SECONDS_TO_LISTEN = 120.0
SECONDS_TO_STOP = 20.0


class Services:
    """Runs `python -m MODULE ...`, each with one thread and a log file; leaving stops them all."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Services:
        # A closed terminal, or a polite kill, must leave as little behind as a Ctrl-C.
        self._before = {
            number: signal.signal(number, signal.default_int_handler)
            for number in (signal.SIGTERM, signal.SIGHUP)
        }
        return self

    def __exit__(self, *error: object) -> None:
        with uninterrupted():
            # The last one started may need the earlier ones to end well.
            for process in reversed(self._running):
                _stop(process)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, name: str, arguments: Sequence[str]) -> str:
        """Wait for a process to end and return what it printed. Raises InternalFault."""
        process = self._start(name, arguments)
        try:
            code = process.wait()
        finally:
            _stop(process)
            self._running.remove(process)
        if code:
            raise self._failed(name, f"ended with exit code {code}")
        return self._log(name).read_text(errors="replace")

    def listen(self, name: str, arguments: Sequence[str]) -> str:
        """Start a server and return its HOST:PORT once it listens. Raises InternalFault."""
        process = self._start(name, arguments)
        deadline = time.monotonic() + SECONDS_TO_LISTEN
        while time.monotonic() < deadline:
            for line in self._log(name).read_text(errors="replace").splitlines():
                _, found, address = line.partition(f"{name} listening on ")
                if found:
                    return address.strip()
            if process.poll() is not None:
                raise self._failed(name, f"ended with exit code {process.returncode}")
            time.sleep(0.1)
        raise self._failed(name, f"does not listen after {SECONDS_TO_LISTEN:.0f} s")

    def _start(self, name: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Side by side, two processes of two threads each are many times slower than of one.
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                # A Ctrl-C is ours: servers must live on until the job has ended.
                start_new_session=True,
            )
        self._running.append(process)
        return process

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _failed(self, name: str, how: str) -> InternalFault:
        return InternalFault(f"{name} {how}", hint=f"read {self._log(name)}")


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Clean up without being stopped half-way by an impatient second Ctrl-C."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_STOP)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

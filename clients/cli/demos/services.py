"""The child processes of a demo, each with a log file.

At the end of the demo, all of them are stopped.
"""

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

SECONDS_TO_LISTEN = 600.0  # a process that ends is reported at once
SECONDS_TO_STOP = 20.0


class Services:
    """A context manager that runs `python -m MODULE ...` processes, and stops all of them on exit.

    Each process has one compute thread, and writes its output to `logs`/NAME.log. During the block,
    SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does. Only for the main thread.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Services:
        # A closed terminal or a `kill` must stop the processes, as Ctrl-C does.
        self._previous_handlers = {
            number: signal.signal(number, signal.default_int_handler)
            for number in (signal.SIGTERM, signal.SIGHUP)
        }
        return self

    def __exit__(self, *error: object) -> None:
        with uninterrupted():
            # In reverse order: a process may need earlier ones for a clean end.
            for process in reversed(self._running):
                _stop_process(process)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def run(self, name: str, arguments: Sequence[str]) -> str:
        """Run a process to its end and return its output, including stderr.

        Raises InternalFault if the exit code is not 0.
        """
        process = self._start_process(name, arguments)
        try:
            code = process.wait()
        finally:
            _stop_process(process)
            self._running.remove(process)
        if code:
            raise self._failure(name, f"ended with exit code {code}")
        return self._log_file(name).read_text(encoding="utf-8", errors="replace")

    def listen(self, name: str, arguments: Sequence[str]) -> str:
        """Start a server, wait for its line "NAME listening on HOST:PORT", and return HOST:PORT.

        Raises InternalFault if the server exits, or does not listen within 600 s.
        """
        process = self._start_process(name, arguments)
        deadline = time.monotonic() + SECONDS_TO_LISTEN
        while time.monotonic() < deadline:
            for line in (
                self._log_file(name).read_text(encoding="utf-8", errors="replace").splitlines()
            ):
                _, prefix, address = line.partition(f"{name} listening on ")
                if prefix:
                    return address.strip()
            if process.poll() is not None:
                raise self._failure(name, f"ended with exit code {process.returncode}")
            time.sleep(0.1)
        raise self._failure(name, f"is not listening after {SECONDS_TO_LISTEN:.0f} s")

    def _start_process(self, name: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._log_file(name).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # With more threads than cores, processes run many times slower.
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                # A session of its own, so that Ctrl-C does not stop the servers before the job.
                start_new_session=True,
            )
        self._running.append(process)
        return process

    def _log_file(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _failure(self, name: str, ending: str) -> InternalFault:
        return InternalFault(f"{name} {ending}", hint=f"read {self._log_file(name)}")


@contextmanager
def uninterrupted() -> Iterator[None]:
    """During the block, ignore SIGINT, SIGTERM and SIGHUP.

    A second Ctrl-C can therefore not stop a clean-up.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous_handlers = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _stop_process(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_STOP)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

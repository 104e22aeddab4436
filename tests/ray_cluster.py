"""A Ray cluster of this machine, whose head can be killed and started again, empty."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

_START_SECONDS = 180.0  # seven on a quiet machine


class Cluster:
    """A head of so many CPUs on free ports of 127.0.0.1; `dashboard`: with its Jobs API."""

    def __init__(self, log: Path, *, cpus: int = 3, dashboard: bool = False) -> None:
        self._log = log
        self._cpus = cpus
        # Short: sockets live there, whose names have a limit.
        self._place = Path(f"/tmp/ray-{os.getpid()}")
        port, self._page, self._agent = _free_ports(3)
        self._dashboard = dashboard
        self._port = port
        self.address = f"127.0.0.1:{port}"
        self.jobs = f"http://127.0.0.1:{self._page}"
        self.start()

    def start(self) -> None:
        """A cluster that knows nothing of an earlier one."""
        options = [f"--port={self._port}", "--node-ip-address=127.0.0.1"]
        options += [f"--temp-dir={self._place}", "--disable-usage-stats"]
        options += ["--no-monitor", f"--include-dashboard={str(self._dashboard).lower()}"]
        if self._dashboard:
            options += ["--dashboard-host=127.0.0.1", f"--dashboard-port={self._page}"]
            options.append(f"--dashboard-agent-listen-port={self._agent}")
        ray = str(Path(sys.executable).with_name("ray"))
        with self._log.open("w") as output:
            self._head = subprocess.Popen(
                [ray, "start", "--head", "--block", f"--num-cpus={self._cpus}", *options],
                stdout=output,
                stderr=output,
                # Workers are made when they are needed: of those made before, none would be.
                env={**os.environ, "RAY_prestart_worker_first_driver": "0"},
                start_new_session=True,
            )
        try:
            self._wait_for_head()
        except BaseException:
            self.kill()
            raise

    def _wait_for_head(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while "Ray runtime started" not in self._log.read_text():
            assert self._head.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.1)

    def processes(self, word: str = "") -> list[psutil.Process]:
        """Ray's own, of whose command line `word` is a part."""
        found = []
        for one in psutil.Process(self._head.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if word in " ".join(one.cmdline()):
                    found.append(one)
        return found

    def kill(self) -> None:
        """As a machine that loses its power."""
        for process in [*self.processes(), psutil.Process(self._head.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._head.wait(20)
        shutil.rmtree(self._place, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        found = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]

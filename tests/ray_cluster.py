"""A Ray cluster on this machine, which can be killed and started again as an empty one."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

from protos.rpc.ports import free_ports

_START_SECONDS = 180.0  # about seven seconds on an idle machine


class Cluster:
    """Nodes of so many CPUs on free ports of `host`, the first one the head; `dashboard`: with
    its Jobs API, on 127.0.0.1. `gpus`: that each node says it has. `log` has what the newest node
    said. `environment`: of its nodes, and for its clients: with the token, if it asks for one.
    """

    def __init__(
        self,
        log: Path,
        *cpus: int,
        dashboard: bool = False,
        host: str = "127.0.0.1",
        gpus: int = 0,
    ) -> None:
        self._log = log
        # Start workers only on demand: prestarted workers would not be used.
        self.environment = {**os.environ, "RAY_prestart_worker_first_driver": "0"}
        self._cpus = cpus
        # A short path, because it holds sockets, whose paths have a maximum length.
        self._directory = Path(f"/tmp/ray-{os.getpid()}")
        port, self._dashboard_port, *self._agents = free_ports(2 + len(cpus))
        self._dashboard = dashboard
        self._port = port
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._host, self._gpus = host, gpus
        self.address = f"{host}:{port}"
        self.jobs = f"http://127.0.0.1:{self._dashboard_port}"
        self.start()

    def start(self) -> None:
        """Start an empty cluster."""
        head = ["--head", f"--port={self._port}", f"--temp-dir={self._directory}"]
        head += ["--no-monitor", "--disable-usage-stats"]
        head.append(f"--include-dashboard={str(self._dashboard).lower()}")
        if self._dashboard:
            head += ["--dashboard-host=127.0.0.1", f"--dashboard-port={self._dashboard_port}"]
        try:
            self._start_node(0, head)
            for node in range(1, len(self._cpus)):
                self._start_node(node, [f"--address={self.address}"])
        except BaseException:
            self.kill()
            raise

    def processes(self, word: str = "") -> list[psutil.Process]:
        """Return the processes of Ray whose command line contains `word`."""
        matching_processes = []
        for node in self._nodes:
            children = []
            with contextlib.suppress(psutil.NoSuchProcess):  # the node has already ended
                children = psutil.Process(node.pid).children(recursive=True)
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if word in " ".join(child.cmdline()):
                        matching_processes.append(child)
        return matching_processes

    def kill(self) -> None:
        """Kill all processes, as if the machines lost power."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for node in self._nodes:
            node.kill()
            node.wait(20)
        self._nodes.clear()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start_node(self, number: int, options: list[str]) -> None:
        options += [f"--num-cpus={self._cpus[number]}", f"--node-ip-address={self._host}"]
        options.append(f"--num-gpus={self._gpus}")
        options.append(f"--dashboard-agent-listen-port={self._agents[number]}")
        ray = str(Path(sys.executable).with_name("ray"))
        with self._log.open("w") as output:
            node = subprocess.Popen(
                [ray, "start", "--block", *options],
                stdout=output,
                stderr=output,
                env=self.environment,
                start_new_session=True,
            )
        self._nodes.append(node)
        deadline = time.monotonic() + _START_SECONDS
        while "Ray runtime started" not in self._log.read_text():
            assert node.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.1)

"""Real rollout services for tests: started on any port, killed at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from protos.rpc.ports import free_ports
from tests.forked_python import ForkedPython


class ServiceProcess:
    """`python -m student_trainer.rollout_service`, ready when the constructor returns."""

    def __init__(
        self,
        *args: str,
        log: Path,
        port: int = 0,
        failpoint: str = "",
        launched: bool = False,
    ) -> None:
        """`launched`: start a new interpreter, which vLLM needs, not a fork of a preloaded one."""
        self.log = log
        start = subprocess.Popen[str] if launched else ForkedPython
        command = [sys.executable, "-m", "student_trainer.rollout_service", *args]
        with log.open("ab") as stderr:
            self.process = start(
                [*command, "--port", str(port or free_ports(1)[0])],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "DISTILL_FAILPOINT": failpoint},
            )
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line.startswith("rollout service listening on "), log.read_text()
        self.address = line.split()[-1]
        self.port = int(self.address.rpartition(":")[2])

    def send(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def stop(self) -> int:
        """Send SIGTERM, and return the exit code."""
        self.process.terminate()
        return self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        assert self.process.stdout
        self.process.stdout.close()

"""Real teacher processes for tests: started on any port, killed at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from protos.rpc.ports import free_ports
from tests.forked_python import ForkedPython


class TeacherProcess:
    """`python -m teacher_service`, ready when the constructor returns.

    It is forked from a process that has imported it, unless it is `launched`: then its memory and
    its command line are its own.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        log: Path,
        port: int = 0,
        failpoint: str = "",
        module: str = "teacher_service",
        launched: bool = False,
    ) -> None:
        self.log = log
        if port and not launched:
            time.sleep(0.3)  # to start a program again takes longer than that
        command = [sys.executable, "-m", module, *args, "--port", str(port or free_ports(1)[0])]
        with log.open("ab") as stderr:
            self.process = (subprocess.Popen if launched else ForkedPython)(
                command,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "DISTILL_FAILPOINT": failpoint},
            )
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line.startswith("teacher listening on "), log.read_text()
        self.address = line.split()[-1]
        self.port = int(self.address.rsplit(":")[-1])

    def send(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def kill(self) -> None:
        """As a crash would: no last word."""
        self.process.kill()
        self.process.wait(20)

    def stop(self) -> int:
        """As an operator would; the exit code."""
        self.process.terminate()
        return self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        assert self.process.stdout
        self.process.stdout.close()

"""The real teacher in a forked process, which saves the time of its imports."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from protos.rpc.ports import free_ports
from tests.forks import fork


class ForkedTeacher:
    """`distill-teacher`, ready when the constructor returns."""

    def __init__(self, arguments: Sequence[str], *, log: Path, port: int = 0) -> None:
        receiver, sender = Pipe(duplex=False)
        with receiver, sender:
            port_option = str(port or free_ports(1)[0])
            self._process = fork(_run_teacher, [*arguments, "--port", port_option], log, sender)
            sender.close()
            with open(receiver.fileno(), closefd=False) as output:
                line = output.readline()
        assert line.startswith("teacher listening on "), log.read_text()
        self.address = line.split()[-1]

    def close(self) -> None:
        """Kill the process, as a crash would."""
        self._process.kill()
        self._process.join()


def _run_teacher(arguments: list[str], log: Path, sender: Connection) -> None:
    with log.open("ab") as stderr:
        os.dup2(stderr.fileno(), 2)
    os.dup2(sender.fileno(), 1)
    sys.stdout = open(1, "w", closefd=False, buffering=1)  # noqa: SIM115
    sys.argv = ["distill-teacher", *arguments]
    from teacher_service.__main__ import main

    main()

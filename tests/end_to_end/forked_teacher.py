"""The real teacher in a forked process: ready as soon as its model is."""

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
        told, tells = Pipe(duplex=False)
        with told, tells:
            chosen = str(port or free_ports(1)[0])
            self._process = fork(_teach, [*arguments, "--port", chosen], log, tells)
            tells.close()
            with open(told.fileno(), closefd=False) as printed:
                line = printed.readline()
        assert line.startswith("teacher listening on "), log.read_text()
        self.address = line.split()[-1]

    def close(self) -> None:
        """As a crash would: no last word."""
        self._process.kill()
        self._process.join()


def _teach(arguments: list[str], log: Path, tells: Connection) -> None:
    with log.open("ab") as stderr:
        os.dup2(stderr.fileno(), 2)
    os.dup2(tells.fileno(), 1)
    sys.stdout = open(1, "w", closefd=False, buffering=1)  # noqa: SIM115
    sys.argv = ["distill-teacher", *arguments]
    from teacher_service.__main__ import main

    main()

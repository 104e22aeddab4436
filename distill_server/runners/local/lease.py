"""The lease of a process that serves a server's jobs and outlives the server.

The process ends when its lease is over. The server renews the lease whenever it polls the process.
Without a server, the process is needed as long as trainers of the server run. A trainer renews the
lease too: its shim touches the file `heartbeat`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# Renewed by the server, in the directory of the process.
LEASE_FILE = "lease"


@dataclass
class Lease:
    """A lease that is over after `seconds` without any sign of a server or a trainer.

    - file: the server touches this file.
    - runs: the directory of the runs; their trainers touch the `heartbeat` files in it.

    Only times of files are compared with each other, so a change of the clock does not end a lease.
    """

    file: Path
    runs: Path
    seconds: float
    clock: Callable[[], float] = time.monotonic
    _renewed_at: float = field(init=False)
    _server_time: int = field(init=False, default=-1)
    _trainer_time: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._renewed_at = self.clock()

    def is_over(self) -> bool:
        """Return True if the lease is over. Raises OSError if the directories do not answer."""
        server_time = _time_of(self.file)
        if server_time != self._server_time:
            self._server_time, self._renewed_at = server_time, self.clock()
        if self.clock() - self._renewed_at <= self.seconds:
            return False
        # Check the trainers rarely, because listing the heartbeats of many runs takes long.
        heartbeats = self.runs.glob("*/logs/*/heartbeat")
        trainer_time = max(map(_time_of, heartbeats), default=0)
        if trainer_time != self._trainer_time:
            self._trainer_time, self._renewed_at = trainer_time, self.clock()
            return False
        return True


def _time_of(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return 0

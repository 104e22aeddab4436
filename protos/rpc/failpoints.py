"""Named places where a test lets a program die, stall or fail, at the points where it matters.

    DISTILL_FAILPOINT=checkpoint-sealed:kill            SIGKILL when it is reached
    DISTILL_FAILPOINT=shard-renamed:sleep:2.5           seconds, each time
    DISTILL_FAILPOINT=scored:raise:3                    OSError, the third time (1 if no number)

One failpoint a process, read once. Unarmed, a hit is one comparison.
"""

from __future__ import annotations

import errno
import os
import signal
import time

VARIABLE = "DISTILL_FAILPOINT"


class _Armed:
    def __init__(self, spec: str) -> None:
        self.name, _, rest = spec.partition(":")
        self._action, _, self._argument = rest.partition(":")
        self._hits = 0

    def act(self) -> None:
        self._hits += 1
        match self._action:
            case "kill":
                if self._hits == int(self._argument or 1):
                    os.kill(os.getpid(), signal.SIGKILL)
            case "sleep":
                time.sleep(float(self._argument))
            case "raise":
                if self._hits == int(self._argument or 1):
                    raise OSError(errno.EIO, f"failpoint {self.name}")
            case action:
                raise ValueError(f"{VARIABLE}: no action {action!r}; kill, sleep or raise")


_armed = _Armed(os.environ.get(VARIABLE, ""))


def failpoint(name: str) -> None:
    """A place to fail at; `name` is a literal that occurs once in the source."""
    if name == _armed.name:
        _armed.act()


def arm(spec: str) -> None:
    """What the variable would say, for a process that is running already."""
    global _armed
    _armed = _Armed(spec)

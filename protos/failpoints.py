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
    def __init__(self, action: str, argument: str) -> None:
        self._action = action
        self._argument = argument
        self._hits = 0

    def act(self, name: str) -> None:
        self._hits += 1
        match self._action:
            case "kill":
                if self._hits == int(self._argument or 1):
                    os.kill(os.getpid(), signal.SIGKILL)
            case "sleep":
                time.sleep(float(self._argument))
            case "raise":
                if self._hits == int(self._argument or 1):
                    raise OSError(errno.EIO, f"failpoint {name}")
            case action:
                raise ValueError(f"{VARIABLE}: no action {action!r}; kill, sleep or raise")


_name, _, _rest = os.environ.get(VARIABLE, "").partition(":")
_action, _, _argument = _rest.partition(":")
_armed = _Armed(_action, _argument)


def failpoint(name: str) -> None:
    """A place to fail at; `name` is a literal that occurs once in the source."""
    if name == _name:
        _armed.act(name)

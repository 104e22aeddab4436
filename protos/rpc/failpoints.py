"""Failpoints: named places in the source where a test makes the program die, stall or fail.

    DISTILL_FAILPOINT=checkpoint-sealed:kill     SIGKILL at the first hit
    DISTILL_FAILPOINT=shard-renamed:sleep:2.5    sleep 2.5 seconds at every hit
    DISTILL_FAILPOINT=scored:raise:3             raise OSError at the third hit (first by default)

A hit is one execution of the place. The variable is read once, and arms one failpoint per process.
A hit of another failpoint costs one string comparison.
"""

from __future__ import annotations

import errno
import os
import signal
import time

VARIABLE = "DISTILL_FAILPOINT"


class _Armed:
    def __init__(self, spec: str) -> None:
        self.name, _, action_spec = spec.partition(":")
        self._action, _, self._argument = action_spec.partition(":")
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
                raise ValueError(f"{VARIABLE}: unknown action {action!r}; use kill, sleep or raise")


_armed = _Armed(os.environ.get(VARIABLE, ""))


def failpoint(name: str) -> None:
    """Mark a place in the source where a test can make the program die, stall or fail.

    `name`: a literal that occurs once in the source. Raises OSError if a test has armed this
    failpoint with the action `raise`, at the hit with the given number.
    """
    if name == _armed.name:
        _armed.act()


def arm(spec: str) -> None:
    """Arm a failpoint in a running process. `spec` has the syntax of $DISTILL_FAILPOINT."""
    global _armed
    _armed = _Armed(spec)

"""The interface between the scheduler and the runners that run attempts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from clients.runs.directory import RunDirectory
from distill_server.runners.machine import Share

# The time from SIGTERM to SIGKILL. The request to stop in control.json is written long before.
KILL_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Running:
    """The attempt is running or will start. `phase`, if not "", replaces the trainer's phase."""

    phase: str = ""


@dataclass(frozen=True)
class Exited:
    """The trainer exited with `code`; -N means that signal N killed it."""

    code: int


@dataclass(frozen=True)
class Lost:
    """The attempt is not running and its exit code is unknown.

    - blameless: True if the trainer is not the cause of the end. The attempt never started, the
      machine was rebooted, the attempt of an earlier server disappeared together with its shim (a
      restarted container), or the cluster took its nodes away.
    - reason: the cluster's explanation, if any.
    """

    blameless: bool
    reason: str = ""


@dataclass(frozen=True)
class CancelledInCluster:
    """The attempt was cancelled with the tools of the cluster, not through the server."""

    reason: str


Outcome = Running | Exited | Lost | CancelledInCluster


class Runner(Protocol):
    """Runs attempts in processes that continue after the end of the server.

    The scheduler calls all methods in threads, because they read the run directory, with one call
    at a time per run directory. JobControl can call `stop` at any time.
    """

    def start(
        self,
        run: RunDirectory,
        *,
        attempt: int,
        processes: int,
        from_step: int | None,
        share: Share,
    ) -> None:
        """Start an attempt with this share of the machine. Raises OSError if it cannot start.

        `processes` is the number of ranks; `from_step` None means the newest checkpoint.
        """

    def poll(self, run: RunDirectory, attempt: int) -> Outcome:
        """Return the state of an attempt.

        Polling an attempt that never started claims it, so that it can no longer start.
        """

    def stop(self, run: RunDirectory, attempt: int, *, now: bool) -> None:
        """Send SIGTERM to the trainer and SIGKILL after a grace period; with `now`, only SIGKILL.

        May be called repeatedly.
        """


class CommandFactory(Protocol):
    """Builds the command line of one attempt, as `clients.runs.launch.trainer_command` does."""

    def __call__(
        self, run: Path, *, attempt: int, processes: int, from_step: int | None = None
    ) -> list[str]:
        """Return the arguments that start `processes` ranks of the run."""
        ...

"""What the scheduler asks of whoever runs attempts, and the answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from clients.runs.directory import RunDirectory
from distill_server.runners.machine import Share

# From SIGTERM to SIGKILL. The trainer was asked politely long before, through control.json.
KILL_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Running:
    """The attempt goes on, or will. `phase`: what to tell people in place of the trainer's word."""

    phase: str = ""


@dataclass(frozen=True)
class Exited:
    """The trainer ended with `code`; minus the signal's number when a signal killed it."""

    code: int


@dataclass(frozen=True)
class Lost:
    """Nobody runs the attempt and nobody wrote how it ended.

    `blameless`: it never started, or the machine was rebooted under it.
    """

    blameless: bool


Outcome = Running | Exited | Lost


class Runner(Protocol):
    """Runs attempts so that they outlive the server. No method waits for anything but a disk."""

    def start(
        self,
        run: RunDirectory,
        *,
        attempt: int,
        processes: int,
        from_step: int | None,
        share: Share,
    ) -> None:
        """Begin an attempt; raises OSError when that cannot be."""

    def poll(self, run: RunDirectory, attempt: int) -> Outcome:
        """How an attempt fares. Asking about an attempt that never started claims it for good."""

    def stop(self, run: RunDirectory, attempt: int, *, now: bool) -> None:
        """SIGTERM for the trainer, and SIGKILL after a grace; `now`: SIGKILL. Safe to repeat."""


class CommandFactory(Protocol):
    """Makes the command of one attempt, as `clients.runs.launch.trainer_command` does."""

    def __call__(
        self, run: Path, *, attempt: int, processes: int, from_step: int | None = None
    ) -> list[str]: ...

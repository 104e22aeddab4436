"""Starts trainers on this machine, each under a shim that outlives the server.

What it knows of an attempt it reads from the attempt's log directory, so a restarted server asks
the same questions and gets the same answers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from clients.runs.directory import RunDirectory
from clients.runs.fence import VARIABLE as FENCE
from clients.runs.fence import raise_fence
from clients.runs.launch import trainer_command
from distill_server.runners.interface import (
    KILL_GRACE_SECONDS,
    CommandFactory,
    Exited,
    Lost,
    Outcome,
    Running,
)
from distill_server.runners.local.process import (
    boot_id,
    claim,
    identity_of,
    kill_family,
    send_signal,
)
from distill_server.runners.local.shim_files import Card, card_of, exit_code_of
from distill_server.runners.machine import Share
from distill_server.runners.teacher_token import teacher_token
from distill_server.runners.trainer_environment import trainer_environment

# From the shim's claim to its shim.json: milliseconds, but the machine may be very busy.
_START_SECONDS = 30.0


class LocalRunner:
    """Trainers as processes of this machine. One instance per server."""

    def __init__(self, *, command: CommandFactory = trainer_command) -> None:
        self._command = command
        # Shims this server started: they must be waited for, or they stay zombies.
        self._children: dict[Path, subprocess.Popen[bytes]] = {}
        self._started: set[Path] = set()
        self._claimed_since: dict[Path, float] = {}

    def start(
        self,
        run: RunDirectory,
        *,
        attempt: int,
        processes: int,
        from_step: int | None,
        share: Share,
    ) -> None:
        """Launch the shim of one attempt; raises OSError when the machine cannot."""
        fence = raise_fence(run.path, attempt)
        log = run.log_file(attempt)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._started.add(log.parent)
        argv = self._command(run.path, attempt=attempt, processes=processes, from_step=from_step)
        shim = [
            sys.executable,
            "-m",
            "distill_server.runners.local.shim",
            str(log),
            str(KILL_GRACE_SECONDS),
        ]
        environment = trainer_environment(os.environ, share, processes)
        environment |= {**teacher_token(run.path.name, attempt), FENCE: fence}
        with log.open("ab") as output:
            self._children[log.parent] = subprocess.Popen(
                [*shim, "--", *argv],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C in the server's terminal is not meant for the trainers.
                start_new_session=True,
            )

    def poll(self, run: RunDirectory, attempt: int) -> Outcome:
        """How an attempt fares. Asking about an attempt that never started claims it for good."""
        directory = run.logs(attempt)
        self._reap()
        if ended := _exit_of(directory):
            return ended
        card = card_of(directory)
        if card is None:
            return self._starting(directory)
        if identity_of(card.shim.pid) == card.shim:
            return Running()
        # It may have written the file between the two looks.
        return _exit_of(directory) or _abandoned(card)

    def stop(self, run: RunDirectory, attempt: int, *, now: bool) -> None:
        """SIGTERM for the trainer, and SIGKILL after a grace; `now`: SIGKILL. Safe to repeat."""
        directory = run.logs(attempt)
        signum = signal.SIGQUIT if now else signal.SIGTERM
        if card := card_of(directory):
            send_signal(card.shim, signum)
        elif child := self._children.get(directory):
            child.send_signal(signum)

    def _starting(self, directory: Path) -> Outcome:
        """There is no readable shim.json: is a shim on its way?"""
        if directory in self._children:
            return Running()
        if not directory.is_dir() or claim(directory):
            return Lost(blameless=directory not in self._started)
        since = self._claimed_since.setdefault(directory, time.monotonic())
        if directory not in self._started and time.monotonic() - since < _START_SECONDS:
            return Running()
        return Lost(blameless=False)

    def _reap(self) -> None:
        self._children = {d: c for d, c in self._children.items() if c.poll() is None}


def _exit_of(directory: Path) -> Exited | None:
    code = exit_code_of(directory)
    return None if code is None else Exited(code)


def _abandoned(card: Card) -> Lost:
    """The shim was killed: end what it left, so that no two trainers share a run directory."""
    if card.shim.boot_id != boot_id():
        return Lost(blameless=True)
    kill_family(card.mark)
    return Lost(blameless=False)

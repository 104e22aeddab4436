"""Runs trainers on this machine, each under a shim that outlives the server.

The state of an attempt is in its log directory, so a restarted server finds the same state.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
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
from distill_server.runners.local.lease import LEASE_FILE
from distill_server.runners.local.process import (
    boot_id,
    claim,
    identity_of,
    send_signal,
)
from distill_server.runners.local.shim_files import (
    Card,
    card_of,
    exit_code_of,
    kill_processes,
)
from distill_server.runners.machine import Share
from distill_server.runners.trainer_environment import (
    attempt_tokens,
    trainer_environment,
    without_trackers,
)

# The longest time from a shim's claim to its shim.json: milliseconds, unless the machine is busy.
_START_SECONDS = 30.0


class LocalRunner:
    """Runs trainers as processes of this machine. One instance per server.

    Thread-safe for different run directories. For one run directory, only `stop` may be called
    while another call runs.
    """

    def __init__(
        self,
        *,
        command: CommandFactory = trainer_command,
        has_trackers: bool = True,
        lease: tuple[Path, float] | None = None,
    ) -> None:
        """`command` builds the command line of an attempt.

        - has_trackers: False for programs that must not get the keys of experiment trackers.
        - lease: (runs, seconds) gives each program a lease, None gives none. The program ends if
          for `seconds` no server polls it and no trainer runs in the directory `runs`.
        """
        self._lease = lease
        self._command = command
        self._has_trackers = has_trackers
        # Shims that this server started. They must be waited for, or they stay zombies.
        self._children: dict[Path, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()  # guards `_children`
        # A cache, so that `stop` works while the run directory does not answer.
        self._cards: dict[Path, Card] = {}
        self._started_directories: set[Path] = set()
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
        """Start the shim of one attempt. Raises OSError if it cannot be started."""
        fence = raise_fence(run.path, attempt)
        log = run.log_file(attempt)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._started_directories.add(log.parent)
        argv = self._command(run.path, attempt=attempt, processes=processes, from_step=from_step)
        shim = [
            sys.executable,
            "-P",
            "-m",
            "distill_server.runners.local.shim",
            str(log),
            str(KILL_GRACE_SECONDS),
        ]
        if self._lease is not None:
            needed_by, seconds = self._lease
            shim += ["--lease", str(run.path / LEASE_FILE), str(needed_by), str(seconds)]
        environment = trainer_environment(os.environ, share, processes)
        if not self._has_trackers:
            environment = without_trackers(environment)
        environment |= {**attempt_tokens(run.path.name, attempt), FENCE: fence}
        with log.open("ab") as output:
            child = subprocess.Popen(
                [*shim, "--", *argv],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # In a new session, so that Ctrl-C in the server's terminal does not end trainers.
                start_new_session=True,
            )
        with self._lock:
            self._children[log.parent] = child

    def poll(self, run: RunDirectory, attempt: int) -> Outcome:
        """Return the state of an attempt. Polling an attempt that never started claims it."""
        directory = run.logs(attempt)
        self._reap_children()
        if outcome := _read_exit(directory):
            self._cards.pop(directory, None)
            return outcome
        card = card_of(directory)
        if card is None:
            return self._judge_unstarted(directory)
        if identity_of(card.shim.pid) == card.shim:
            self._cards[directory] = card
            return Running()
        self._cards.pop(directory, None)
        # The shim may have written exit.json between the first check and its end.
        return _read_exit(directory) or self._end_abandoned(directory, card)

    def stop(self, run: RunDirectory, attempt: int, *, now: bool) -> None:
        """Send SIGTERM, and SIGKILL after a grace period; with `now`, only SIGKILL.

        The shim sends these signals. If the shim is suspended, for example by SIGSTOP, it is
        continued first.
        """
        directory = run.logs(attempt)
        signum = signal.SIGQUIT if now else signal.SIGTERM
        for signal_to_shim in (signum, signal.SIGCONT):
            if child := self._children.get(directory):
                child.send_signal(signal_to_shim)
            elif card := self._cards.get(directory) or card_of(directory):
                send_signal(card.shim, signal_to_shim)

    def _judge_unstarted(self, directory: Path) -> Outcome:
        """Return the state of an attempt without shim.json.

        The state is Running if its shim may still be starting, else Lost.
        """
        if directory in self._children:
            return Running()
        if not directory.is_dir() or claim(directory):
            return Lost(blameless=directory not in self._started_directories)
        since = self._claimed_since.setdefault(directory, time.monotonic())
        if directory not in self._started_directories and time.monotonic() - since < _START_SECONDS:
            return Running()
        return self._make_lost(directory)

    def _end_abandoned(self, directory: Path, card: Card) -> Lost:
        """Kill the processes of a dead shim, so that no two trainers share a run directory."""
        if card.shim.boot_id != boot_id():
            return Lost(blameless=True)
        kill_processes(directory, card)
        return self._make_lost(directory)

    def _make_lost(self, directory: Path) -> Lost:
        # If this server did not start the attempt, server and shim ended together: their container
        # was restarted, or all processes were killed.
        return Lost(blameless=directory not in self._started_directories)

    def _reap_children(self) -> None:
        with self._lock:
            directories = [
                directory for directory, child in self._children.items() if child.poll() is not None
            ]
            for directory in directories:
                del self._children[directory]


def _read_exit(directory: Path) -> Exited | None:
    code = exit_code_of(directory)
    return None if code is None else Exited(code)

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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from clients.fence import VARIABLE as FENCE
from clients.fence import raise_fence
from clients.launch import trainer_command
from clients.run_directory import RunDirectory
from distill_server.machine import Share
from distill_server.process import (
    Identity,
    boot_id,
    claim,
    identity_of,
    kill_family,
    read_json,
    send_signal,
)

_ALLOWED = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV"}
    | {"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "XDG_CACHE_HOME"}
    | {"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"}
    | {"TOKENIZERS_PARALLELISM"}
    # What a trainer needs to reach its teacher; never the tokens of this server.
    | {"DISTILL_TEACHER_TOKEN", "DISTILL_TEACHER_TOKEN_FILE"}
    | {"DISTILL_TLS_CA", "DISTILL_TLS_CERT", "DISTILL_TLS_KEY"}
)
_ALLOWED_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "HF_", "TORCH_", "PYTORCH_", "WANDB_")
# From SIGTERM to SIGKILL. The trainer was asked politely long before, through control.json.
_KILL_GRACE_SECONDS = 5.0
# From the shim's claim to its shim.json: milliseconds, but the machine may be very busy.
_START_SECONDS = 30.0


@dataclass(frozen=True)
class Running:
    """The attempt goes on."""


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


@dataclass(frozen=True)
class _Card:
    """A shim.json: who watches the attempt, and the mark of its processes."""

    shim: Identity
    mark: str


class CommandFactory(Protocol):
    def __call__(
        self, run: Path, *, attempt: int, processes: int, from_step: int | None = None
    ) -> list[str]: ...


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
        shim = [sys.executable, "-m", "distill_server.shim", str(log), str(_KILL_GRACE_SECONDS)]
        with log.open("ab") as output:
            self._children[log.parent] = subprocess.Popen(
                [*shim, "--", *argv],
                env={**trainer_environment(os.environ, share, processes), FENCE: fence},
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
        card = _card_of(directory)
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
        if card := _card_of(directory):
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


def trainer_environment(
    environment: Mapping[str, str], share: Share, processes: int
) -> dict[str, str]:
    """What of the server's environment a trainer may see, and its share of the machine."""
    allowed = {
        name: value
        for name, value in environment.items()
        if name in _ALLOWED or name.startswith(_ALLOWED_PREFIXES)
    }
    if share.gpus is not None:
        allowed["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
    threads = max(1, share.cpus // processes)
    return {**allowed, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}


def _exit_of(directory: Path) -> Exited | None:
    code = (read_json(directory / "exit.json") or {}).get("code")
    return Exited(code) if isinstance(code, int) else None


def _card_of(directory: Path) -> _Card | None:
    found = read_json(directory / "shim.json")
    match found:
        case {"boot_id": str(boot), "pid": int(pid), "start_time": int(start), "mark": str(mark)}:
            return _Card(Identity(boot, pid, start), mark)
    return None


def _abandoned(card: _Card) -> Lost:
    """The shim was killed: end what it left, so that no two trainers share a run directory."""
    if card.shim.boot_id != boot_id():
        return Lost(blameless=True)
    kill_family(card.mark)
    return Lost(blameless=False)

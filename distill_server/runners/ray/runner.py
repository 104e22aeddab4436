"""Runs attempts on a Ray cluster, each as one job of Ray's, of which it never starts a second one.

The driver of that job (`ray_driver`) and the server share the run directory and nothing else. Who
has the attempt is decided there, by a claim; how it ended is told there, by exit.json; Ray tells
the rest.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from hashlib import sha256
from pathlib import Path

from clients.runs.directory import RunDirectory
from clients.runs.fence import VARIABLE as FENCE
from clients.runs.fence import raise_fence
from clients.runs.launch import trainer_command
from distill_server.runners.interface import CommandFactory, Exited, Lost, Outcome, Running
from distill_server.runners.local.process import claim
from distill_server.runners.local.shim_files import exit_code_of
from distill_server.runners.machine import Share
from distill_server.runners.ray.cluster import RayCluster
from distill_server.runners.ray.jobs import Absent, Present
from distill_server.runners.ray.order import Order, write_order
from distill_server.runners.teacher_token import teacher_token
from distill_server.runners.trainer_environment import threads_of, trainer_environment

# What another node wrote to shared storage is seen after this.
_STORAGE_SECONDS = 3.0


class RayRunner:
    """One instance per server. Attempts outlive it."""

    def __init__(self, cluster: RayCluster, *, command: CommandFactory = trainer_command) -> None:
        self._cluster = cluster
        self._command = command
        self._over_since: dict[Path, float] = {}

    def start(
        self,
        run: RunDirectory,
        *,
        attempt: int,
        processes: int,
        from_step: int | None,
        share: Share,
    ) -> None:
        """Hand the attempt over; raises OSError when its order cannot be written."""
        fence = raise_fence(run.path, attempt)
        directory = run.logs(attempt)
        directory.mkdir(parents=True, exist_ok=True)
        # One process: the driver runs as many as it takes.
        _, *arguments = self._command(run.path, attempt=attempt, processes=1, from_step=from_step)
        environment = trainer_environment(os.environ, share, processes)
        environment.pop("CUDA_VISIBLE_DEVICES", None)  # of this machine
        order = Order(
            run=str(run.path),
            attempt=attempt,
            arguments=arguments,
            environment={**environment, **teacher_token(run.path.name, attempt), FENCE: fence},
            folder=os.getcwd(),
            processes=processes,
            cpus=threads_of(share, processes),
            gpus=-(-len(share.gpus or ()) // processes),
        )
        path = directory / "order.json"
        write_order(path, order)
        # Ray gives it to a shell. The name of a run has letters, digits, dots and hyphens only.
        entrypoint = [sys.executable, "-m", "distill_server.runners.ray.driver", str(path)]
        self._cluster.submit(_name(run, attempt), shlex.join(entrypoint))

    def poll(self, run: RunDirectory, attempt: int) -> Outcome:
        """How an attempt fares, as far as is known now."""
        name, directory = _name(run, attempt), run.logs(attempt)
        if (code := exit_code_of(directory)) is not None:
            self._forget(name, directory)
            return Exited(code)
        answer, trouble = self._cluster.look(name)
        if trouble:
            return Running(trouble)
        if isinstance(answer, Absent) or (isinstance(answer, Present) and answer.ended):
            since = self._over_since.setdefault(directory, time.monotonic())
            if time.monotonic() - since > _STORAGE_SECONDS:
                self._forget(name, directory)
                return _ending(answer, run, attempt)
            return Running()
        return Running("" if _has_begun(directory) else "waiting for the Ray cluster")

    def stop(self, run: RunDirectory, attempt: int, *, now: bool) -> None:
        """The driver looks in control.json how soon it is to be. Safe to repeat."""
        self._cluster.stop(_name(run, attempt))

    def _forget(self, name: str, directory: Path) -> None:
        self._over_since.pop(directory, None)
        self._cluster.forget(name)


def _name(run: RunDirectory, attempt: int) -> str:
    """For Ray: two servers of one cluster may have jobs of the same id."""
    return f"{run.path.name}-{sha256(bytes(run.path)).hexdigest()[:8]}-{attempt}"


def _has_begun(directory: Path) -> bool:
    return (directory / "rank-0" / "shim.json").exists()


def _ending(answer: Absent | Present, run: RunDirectory, attempt: int) -> Exited | Lost:
    """Of an attempt whose driver wrote no exit.json."""
    directory = run.logs(attempt)
    if not directory.is_dir():
        return Lost(blameless=isinstance(answer, Absent))  # somebody removed it
    # So that a driver that comes late starts nothing.
    never_begun = claim(directory)
    (directory / "order.json").unlink(missing_ok=True)  # it has secrets, and nobody reads it now
    match answer:
        case Absent():
            return Lost(blameless=True)  # the cluster was made anew, or never asked
        case Present(code=code, message=message):
            with run.log_file(attempt).open("a") as log:
                log.write(f"Ray: {message}\n")
            return Lost(blameless=False) if code is None or never_begun else Exited(code)

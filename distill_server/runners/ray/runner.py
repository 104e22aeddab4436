"""Runs each attempt on a Ray cluster as one Ray job, which is started at most once.

The driver of that job (`ray.driver`) and the server share only the run directory. In this
directory, a claim file decides whether the attempt may start, waiting.json has the reason if it
waits, and exit.json has its exit code. All other state comes from Ray.
"""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from clients.config.kinds import AnyJob
from clients.runs.directory import RunDirectory
from clients.runs.launch import rollouts_command, trainer_command
from distill_server.runners.cluster import Cluster, Jobs
from distill_server.runners.interface import CommandFactory, Exited, Lost, Outcome, Running
from distill_server.runners.local.process import claim, read_json
from distill_server.runners.local.shim_files import exit_code_of
from distill_server.runners.machine import Share
from distill_server.runners.order import attempt_name, place_order
from distill_server.runners.ray.jobs import KnownRayJob, RayJobState, UnknownRayJob

log = logging.getLogger(__name__)

# The pause between two polls of all followed jobs.
_PAUSE_SECONDS = 0.5


class RayClusterJobs(Jobs[RayJobState], Protocol):
    """The calls that RayCluster makes to a cluster. `RayJobs` implements them; calls may block."""

    def is_open(self) -> bool:
        """Return True if other machines can run programs on the cluster without a token."""


class RayCluster(Cluster[RayJobState]):
    """The last known state of the followed jobs of a Ray cluster."""

    def __init__(self, jobs: RayClusterJobs) -> None:
        self._calls = jobs
        super().__init__(jobs, "the Ray cluster", _PAUSE_SECONDS)

    def on_first_answer(self) -> None:
        """Warn if the cluster is open to other machines."""
        if self._calls.is_open():
            log.warning(
                "the Ray cluster requires no token: everyone who can reach the cluster can run"
                " programs; start Ray with RAY_AUTH_MODE=token, or use a firewall"
            )


# The delay after which another node's writes to shared storage are visible.
_STORAGE_SECONDS = 3.0


class RayRunner:
    """Runs attempts as jobs of a Ray cluster. One instance per server; attempts outlive it."""

    def __init__(
        self,
        cluster: RayCluster,
        *,
        command: CommandFactory = trainer_command,
        config: Callable[[RunDirectory], AnyJob] = RunDirectory.config,
    ) -> None:
        """`command` builds the trainer's command line, `config` reads the job of a run."""
        self._cluster = cluster
        self._command = command
        self._config = config
        self._ended_since: dict[Path, float] = {}

    def start(
        self,
        run: RunDirectory,
        *,
        attempt: int,
        processes: int,
        from_step: int | None,
        share: Share,
    ) -> None:
        """Submit the attempt to the cluster. Raises OSError if its order cannot be written."""
        engines = _engine_fields(self._config(run), share, processes)
        path = place_order(
            run,
            self._command,
            attempt=attempt,
            processes=processes,
            from_step=from_step,
            share=share,
            **engines,
        )
        # Ray passes the entrypoint to a shell, so it is quoted (shlex.join).
        entrypoint = [sys.executable, "-P", "-m", "distill_server.runners.ray.driver", str(path)]
        self._cluster.submit(attempt_name(run, attempt), shlex.join(entrypoint))

    def poll(self, run: RunDirectory, attempt: int) -> Outcome:
        """Return the last known state of an attempt, without waiting for the cluster."""
        name, directory = attempt_name(run, attempt), run.logs(attempt)
        if (code := exit_code_of(directory)) is not None:
            self._forget_attempt(name, directory)
            return Exited(code)
        job, trouble = self._cluster.get_state(name)
        if trouble:
            return Running(trouble)
        if isinstance(job, UnknownRayJob) or (isinstance(job, KnownRayJob) and job.is_ended):
            since = self._ended_since.setdefault(directory, time.monotonic())
            if time.monotonic() - since > _STORAGE_SECONDS:
                self._forget_attempt(name, directory)
                return _resolve_outcome(job, run, attempt)
            return Running()
        has_begun = (directory / "rank-0" / "shim.json").exists()
        return Running("" if has_begun else _waiting_phase(directory))

    def stop(self, run: RunDirectory, attempt: int, *, now: bool) -> None:
        """Stop the driver. It reads from control.json whether it must stop at once. Repeatable."""
        self._cluster.stop(attempt_name(run, attempt))

    def _forget_attempt(self, name: str, directory: Path) -> None:
        self._ended_since.pop(directory, None)
        self._cluster.forget(name)


def _engine_fields(config: AnyJob, share: Share, processes: int) -> dict[str, Any]:
    """Return the fields of the order with the GPUs of a process, and with the rollout services.

    Services that share the trainer's GPUs are not included: the trainer starts them.
    """
    gpus = len(share.gpus or ())
    rollouts, student = config.rollout_engine, config.trained_student
    if student is None or rollouts is None or not rollouts.gpus:
        return {"gpus": -(-gpus // processes)}
    # Without --gpus, or with resources.gpus = 0, the cluster counts only CPUs for the services, as
    # it does for the trainer.
    trainer_gpus = max(0, gpus - rollouts.gpus)
    return {
        "gpus": -(-trainer_gpus // processes),
        "engines": rollouts.replicas,
        "engine_gpus": rollouts.tensor_parallel_size if gpus else 0,
        "engine_arguments": rollouts_command(student, rollouts)[1:],
    }


def _waiting_phase(directory: Path) -> str:
    reason = (read_json(directory / "waiting.json") or {}).get("for")
    return f"waiting for the Ray cluster: {reason}" if reason else "waiting for the Ray cluster"


def _resolve_outcome(
    job: UnknownRayJob | KnownRayJob, run: RunDirectory, attempt: int
) -> Exited | Lost:
    """Return the outcome of an attempt whose driver has ended without writing exit.json."""
    directory = run.logs(attempt)
    if not directory.is_dir():
        return Lost(blameless=isinstance(job, UnknownRayJob))  # the directory was removed by hand
    # Claim the attempt, so that a driver that starts late does nothing.
    is_unclaimed = claim(directory)
    (directory / "order.json").unlink(missing_ok=True)  # the file contains secrets
    match job:
        case UnknownRayJob():
            return Lost(blameless=True)  # the cluster is new, or the job was never submitted
        case KnownRayJob(code=code, message=message):
            with run.log_file(attempt).open("a") as log:
                log.write(f"Ray: {message}\n")
            return Lost(blameless=False) if code is None or is_unclaimed else Exited(code)

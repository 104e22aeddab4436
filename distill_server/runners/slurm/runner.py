"""Runs each attempt as one job of Slurm, which is started at most once.

The driver of that job (`slurm.driver`) and the server share only the run directory. A claim file
there decides whether the attempt may start, and exit.json holds its exit code. Slurm gives the
reason why an attempt waits or was stopped.

A job that squeue does not list may still run. Therefore, such an attempt ends only when its shims
have no heartbeat any more. The server then claims the attempt, so that it cannot start later.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clients.runs.directory import RunDirectory, Status, replace_file
from clients.runs.launch import trainer_command
from distill_server.runners.cluster import Cluster
from distill_server.runners.interface import (
    CancelledInCluster,
    CommandFactory,
    Exited,
    Lost,
    Outcome,
    Running,
)
from distill_server.runners.local.process import claim, read_json
from distill_server.runners.local.shim_files import LivingShims, exit_code_of
from distill_server.runners.machine import Share
from distill_server.runners.order import attempt_name, place_order, read_order
from distill_server.runners.slurm.jobs import ListedJob, RefusedJob, SlurmJobState, UnlistedJob
from distill_server.runners.slurm.script import job_script

PAUSE_SECONDS = 2.0
# The delay after which another node's writes to shared storage are visible.
_STORAGE_SECONDS = 3.0
# If Slurm answers and does not list an attempt for the first time, the attempt is submitted again,
# because its server may have died before the submission. After the second time, the attempt is
# declared lost.
_RESUBMIT_SECONDS, _ABSENT_SECONDS = 10.0, 300.0
_LOG_LINES = 5

# The ends of a job in Slurm that are not the fault of the trainer.
_BLAMELESS = {
    "PREEMPTED": "Slurm preempted the attempt",
    "NODE_FAIL": "a node of the attempt failed (Slurm: NODE_FAIL)",
    "BOOT_FAIL": "a node of the attempt did not start (Slurm: BOOT_FAIL)",
    "TIMEOUT": "the attempt reached its time limit in Slurm",
    "DEADLINE": "the attempt reached its deadline in Slurm",
    "REVOKED": "Slurm revoked the attempt",
}
_CANCELLED_IN_CLUSTER = (
    "cancelled in Slurm, not through the server; `distill resume` continues the job"
)
_NOT_SHARED = (
    "Slurm ran the attempt ({state}), and nothing appeared in its run directory: --runs and the"
    " server's Python environment must have the same paths on all nodes"
)


@dataclass
class _Watch:
    """The time since the job of an attempt ended, or since squeue stopped to list the job.

    - is_resubmitted: True if the job was submitted again.
    - shims: the shims of the attempt, if the runner waits for their end.
    """

    since: float = field(default_factory=time.monotonic)
    is_resubmitted: bool = False
    shims: LivingShims | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


class SlurmRunner:
    """Runs attempts as jobs of Slurm. One instance per server; attempts outlive it."""

    def __init__(
        self,
        cluster: Cluster[SlurmJobState],
        options: Sequence[str] = (),
        *,
        command: CommandFactory = trainer_command,
    ) -> None:
        """`options` are sbatch options for all jobs. `command` builds the trainer's command."""
        self._cluster = cluster
        self._options = options
        self._command = command
        self._ended_watches: dict[Path, _Watch] = {}
        self._unlisted_watches: dict[Path, _Watch] = {}

    def start(
        self,
        run: RunDirectory,
        *,
        attempt: int,
        processes: int,
        from_step: int | None,
        share: Share,
    ) -> None:
        """Submit the attempt to Slurm. Raises OSError if its files cannot be written."""
        path = place_order(
            run,
            self._command,
            attempt=attempt,
            processes=processes,
            from_step=from_step,
            share=share,
            gpus=-(-len(share.gpus or ()) // processes),
        )
        name = attempt_name(run, attempt)
        script = path.with_name("job.sbatch")
        replace_file(script, job_script(name, path, read_order(path), self._options))
        self._cluster.submit(name, str(script))

    def poll(self, run: RunDirectory, attempt: int) -> Outcome:
        """Return the last known state of an attempt, without waiting for Slurm."""
        name, directory = attempt_name(run, attempt), run.logs(attempt)
        exit_record = read_json(directory / "exit.json") or {}
        if exit_record.get("code") == 0 and not exit_record.get("terminated"):
            return self._end_attempt(name, directory, Exited(0))
        job, trouble = self._cluster.get_state(name)
        if trouble:
            self._unlisted_watches.pop(directory, None)
            return Running(trouble)
        if not isinstance(job, UnlistedJob):
            self._unlisted_watches.pop(directory, None)
        match job:
            case RefusedJob(message=message):
                claim(directory)
                return self._end_attempt(
                    name, directory, Lost(False, f"Slurm refused the job: {message}")
                )
            case UnlistedJob():
                return self._judge_unlisted(run, attempt)
            case ListedJob() if job.is_ended:
                watch = self._ended_watches.setdefault(directory, _Watch())
                if watch.seconds > _STORAGE_SECONDS:
                    return self._end_attempt(name, directory, _resolve_outcome(job, run, attempt))
                return Running()
            case ListedJob(state="PENDING") if run.read_control().stop:
                self._cluster.stop(name)  # no trainer runs yet that could read the request
                return Running(_format_phase(job, directory))
            case ListedJob():
                return Running(_format_phase(job, directory))
        return Running()

    def stop(self, run: RunDirectory, attempt: int, *, now: bool) -> None:
        """Cancel the job in Slurm. Repeatable.

        The processes of the job get SIGTERM. Their shims read the grace period from control.json.
        """
        self._cluster.stop(attempt_name(run, attempt))

    def _judge_unlisted(self, run: RunDirectory, attempt: int) -> Outcome:
        """Return the state of an attempt whose job squeue does not list."""
        name, directory = attempt_name(run, attempt), run.logs(attempt)
        if not directory.is_dir():
            return self._end_attempt(name, directory, Lost(blameless=True))  # removed by hand
        if (code := exit_code_of(directory)) is not None:
            return self._end_attempt(
                name, directory, Exited(code)
            )  # Slurm has forgotten the job since
        watch = self._unlisted_watches.setdefault(directory, _Watch())
        script = directory / "job.sbatch"
        if watch.seconds > _RESUBMIT_SECONDS and not watch.is_resubmitted and script.exists():
            # If squeue was wrong there are two jobs: the later one finds the claim and exits.
            watch.is_resubmitted = True
            if not (directory / "claim").exists() and not run.read_control().stop:
                self._cluster.submit(name, str(script))
        if watch.seconds > _ABSENT_SECONDS and watch.shims is None:
            watch.shims = LivingShims([directory])
        if watch.shims is None or not watch.shims.are_gone():
            return Running("squeue does not list the job of this attempt")
        claim(directory)  # a driver that starts late does nothing
        outcome = Lost(blameless=True, reason="Slurm does not know the attempt any more")
        return self._end_attempt(name, directory, outcome)

    def _end_attempt(self, name: str, directory: Path, outcome: Outcome) -> Outcome:
        self._ended_watches.pop(directory, None)
        self._unlisted_watches.pop(directory, None)
        self._cluster.forget(name)
        (directory / "order.json").unlink(missing_ok=True)  # the file contains secrets
        return outcome


def _format_phase(job: ListedJob, directory: Path) -> str:
    match job.state:
        case "PENDING":
            return f"PENDING in Slurm: {job.reason}" if job.reason else "PENDING in Slurm"
        case "RUNNING" if (directory / "rank-0" / "shim.json").exists():
            return ""
        case "RUNNING":
            return "starting on the nodes of Slurm"
    return f"{job.state} in Slurm"


def _resolve_outcome(job: ListedJob, run: RunDirectory, attempt: int) -> Outcome:
    """Return the outcome of an attempt whose job has ended in Slurm."""
    directory = run.logs(attempt)
    code = exit_code_of(directory)
    if not directory.is_dir():
        return Lost(blameless=job.state in _BLAMELESS)  # the directory was removed by hand
    # Claim the attempt, so that a driver that starts late does nothing.
    is_unclaimed = claim(directory)
    if job.state == "CANCELLED" and not run.read_control().stop:
        return CancelledInCluster(_CANCELLED_IN_CLUSTER)
    if job.state == "CANCELLED" and is_unclaimed:
        run.write_status(Status(attempt, "cancelled"))
        return Exited(0)
    if reason := _BLAMELESS.get(job.state):
        return Lost(blameless=True, reason=reason)
    if job.state == "OUT_OF_MEMORY":
        return Lost(blameless=False, reason="the attempt ran out of memory (Slurm: OUT_OF_MEMORY)")
    if code is not None:
        return Exited(code)
    _log_ending(job, run, attempt)
    if is_unclaimed:
        return Lost(blameless=False, reason=_NOT_SHARED.format(state=job.state))
    return Lost(blameless=False, reason=f"the job of the attempt ended in Slurm: {job.state}")


def _log_ending(job: ListedJob, run: RunDirectory, attempt: int) -> None:
    """Append the messages of Slurm and of the driver to the log of rank 0, which users read."""
    slurm_log = run.logs(attempt) / "slurm.log"
    lines = (
        slurm_log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        if slurm_log.is_file()
        else []
    )
    with run.log_file(attempt).open("a") as log:
        log.write(f"Slurm: job {job.number} {job.state} {job.reason}".rstrip() + "\n")
        log.writelines(f"{line}\n" for line in lines)

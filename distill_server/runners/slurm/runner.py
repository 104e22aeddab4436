"""Runs each attempt as one job of Slurm, which is started at most once.

The driver of that job (`slurm.driver`) and the server share only the run directory. A claim file
there decides whether the attempt may start, and exit.json holds its exit code. Slurm says why an
attempt waits, and why it was stopped. What squeue does not list is not thereby gone: only the
claim, or silent shims, end such an attempt.
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
    CommandFactory,
    Exited,
    Lost,
    Outcome,
    Running,
    Withdrawn,
)
from distill_server.runners.local.living_shims import LivingShims
from distill_server.runners.local.process import claim, read_json
from distill_server.runners.local.shim_files import exit_code_of
from distill_server.runners.machine import Share
from distill_server.runners.order import attempt_name, place_order, read_order
from distill_server.runners.slurm.jobs import Absent, Answer, Present, Refused
from distill_server.runners.slurm.script import job_script

PAUSE_SECONDS = 2.0
# The delay after which another node's writes to shared storage are visible.
_STORAGE_SECONDS = 3.0
# For so long Slurm must answer, and not list an attempt, before it is submitted again, because its
# server died before it could submit; and before it is given up.
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
_WITHDRAWN = "cancelled in Slurm, not through the server; `distill resume` continues the job"
_NOT_SHARED = (
    "Slurm ran the attempt ({state}), and nothing appeared in its run directory: --runs and the"
    " server's Python environment must have the same paths on all nodes"
)


@dataclass
class _Watch:
    """What the server has seen of an attempt since it ended, or was not listed."""

    since: float = field(default_factory=time.monotonic)
    submitted: bool = False
    shims: LivingShims | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


class SlurmRunner:
    """Runs attempts as jobs of Slurm. One instance per server; attempts outlive it."""

    def __init__(
        self,
        cluster: Cluster[Answer],
        options: Sequence[str] = (),
        *,
        command: CommandFactory = trainer_command,
    ) -> None:
        """`options`: of sbatch, for all jobs. `command`: of the trainer; tests have others."""
        self._cluster = cluster
        self._options = options
        self._command = command
        self._over: dict[Path, _Watch] = {}
        self._absent: dict[Path, _Watch] = {}

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
        ended = read_json(directory / "exit.json") or {}
        if ended.get("code") == 0 and not ended.get("terminated"):
            return self._end(name, directory, Exited(0))
        answer, trouble = self._cluster.look(name)
        if trouble:
            self._absent.pop(directory, None)
            return Running(trouble)
        if not isinstance(answer, Absent):
            self._absent.pop(directory, None)
        match answer:
            case Refused(message=message):
                claim(directory)
                return self._end(name, directory, Lost(False, f"Slurm refused the job: {message}"))
            case Absent():
                return self._unlisted(run, attempt)
            case Present() if answer.ended:
                watch = self._over.setdefault(directory, _Watch())
                if watch.seconds > _STORAGE_SECONDS:
                    return self._end(name, directory, _ending(answer, run, attempt))
                return Running()
            case Present(state="PENDING") if run.read_control().stop:
                self._cluster.stop(name)  # it has no trainer yet that could read the request
                return Running(_phase(answer, directory))
            case Present():
                return Running(_phase(answer, directory))
        return Running()

    def stop(self, run: RunDirectory, attempt: int, *, now: bool) -> None:
        """Cancel the job in Slurm. Repeatable.

        Its processes get SIGTERM; the shims read from control.json how long they may go on.
        """
        self._cluster.stop(attempt_name(run, attempt))

    def _unlisted(self, run: RunDirectory, attempt: int) -> Outcome:
        """Judge an attempt that squeue does not list."""
        name, directory = attempt_name(run, attempt), run.logs(attempt)
        if not directory.is_dir():
            return self._end(name, directory, Lost(blameless=True))  # removed by hand
        if (code := exit_code_of(directory)) is not None:
            return self._end(name, directory, Exited(code))  # Slurm has forgotten the job since
        watch = self._absent.setdefault(directory, _Watch())
        script = directory / "job.sbatch"
        if watch.seconds > _RESUBMIT_SECONDS and not watch.submitted and script.exists():
            # If squeue has lied there are two jobs: the later one finds the claim and does nothing.
            watch.submitted = True
            if not (directory / "claim").exists() and not run.read_control().stop:
                self._cluster.submit(name, str(script))
        if watch.seconds > _ABSENT_SECONDS and watch.shims is None:
            watch.shims = LivingShims([directory])
        if watch.shims is None or not watch.shims.are_gone():
            return Running("squeue does not list the job of this attempt")
        claim(directory)  # a driver that starts late does nothing
        lost = Lost(blameless=True, reason="Slurm does not know the attempt any more")
        return self._end(name, directory, lost)

    def _end(self, name: str, directory: Path, outcome: Outcome) -> Outcome:
        self._over.pop(directory, None)
        self._absent.pop(directory, None)
        self._cluster.forget(name)
        (directory / "order.json").unlink(missing_ok=True)  # it has secrets
        return outcome


def _phase(answer: Present, directory: Path) -> str:
    match answer.state:
        case "PENDING":
            return f"PENDING in Slurm: {answer.reason}" if answer.reason else "PENDING in Slurm"
        case "RUNNING" if (directory / "rank-0" / "shim.json").exists():
            return ""
        case "RUNNING":
            return "starting on the nodes of Slurm"
    return f"{answer.state} in Slurm"


def _ending(answer: Present, run: RunDirectory, attempt: int) -> Outcome:
    """Return the outcome of an attempt whose job has ended in Slurm."""
    directory = run.logs(attempt)
    code = exit_code_of(directory)
    if not directory.is_dir():
        return Lost(blameless=answer.state in _BLAMELESS)  # the directory was removed by hand
    # Claim the attempt, so that a driver that starts late does nothing.
    never_begun = claim(directory)
    if answer.state == "CANCELLED" and not run.read_control().stop:
        return Withdrawn(_WITHDRAWN)
    if answer.state == "CANCELLED" and never_begun:
        run.write_status(Status(attempt, "cancelled"))
        return Exited(0)
    if reason := _BLAMELESS.get(answer.state):
        return Lost(blameless=True, reason=reason)
    if answer.state == "OUT_OF_MEMORY":
        return Lost(blameless=False, reason="the attempt ran out of memory (Slurm: OUT_OF_MEMORY)")
    if code is not None:
        return Exited(code)
    _tell(answer, run, attempt)
    if never_begun:
        return Lost(blameless=False, reason=_NOT_SHARED.format(state=answer.state))
    return Lost(blameless=False, reason=f"the job of the attempt ended in Slurm: {answer.state}")


def _tell(answer: Present, run: RunDirectory, attempt: int) -> None:
    """Add what Slurm and the driver said to the log of rank 0, which users read."""
    said = run.logs(attempt) / "slurm.log"
    lines = said.read_text(errors="replace").splitlines()[-_LOG_LINES:] if said.is_file() else []
    with run.log_file(attempt).open("a") as log:
        log.write(f"Slurm: job {answer.number} {answer.state} {answer.reason}".rstrip() + "\n")
        log.writelines(f"{line}\n" for line in lines)

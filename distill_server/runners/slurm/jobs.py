"""A wrapper of sbatch, squeue and scancel. Every call blocks until Slurm answers, at most 30 s."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from shutil import which

from protos.errors import InvalidInput, Unavailable

_TIMEOUT_SECONDS = 30.0
_COMMANDS = ("sbatch", "squeue", "scancel", "srun")
# One call of squeue lists all jobs that are polled in a round. A name that was not polled for a
# minute is left out of the next call.
_LISTING_SECONDS, _NAMES_SECONDS = 1.0, 60.0
_SHOWN_CHARS = 200
# Errors of sbatch when the controller does not answer; all other errors are about the job.
_AWAY = (
    *("unable to contact slurm controller", "socket timed out", "connection refused"),
    *("temporarily unable", "zero bytes", "connection failure", "transport endpoint"),
    *("unexpected message received", "munge"),
)
_ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"}
    | {"PREEMPTED", "REVOKED", "TIMEOUT"}
)


@dataclass(frozen=True)
class UnlistedJob:
    """squeue answered and did not list the job. Slurm may still know the job."""


@dataclass(frozen=True)
class RefusedJob:
    """sbatch refused the job, with this message."""

    message: str


@dataclass(frozen=True)
class ListedJob:
    """The job as squeue lists it: its number, its state such as PENDING, and Slurm's reason."""

    number: int
    state: str
    reason: str = ""

    @property
    def is_ended(self) -> bool:
        """True if all processes of the job have ended."""
        return self.state in _ENDED


SlurmJobState = UnlistedJob | RefusedJob | ListedJob


class SlurmJobs:
    """Submits, stops and lists the jobs of this user by their names.

    The constructor raises InvalidInput if the commands are not installed. All methods raise
    Unavailable if Slurm does not answer. Use one instance from one thread.
    """

    def __init__(self) -> None:
        missing = [command for command in _COMMANDS if which(command) is None]
        if missing:
            raise InvalidInput(
                f"{missing[0]} is not installed on this machine",
                field="--slurm",
                hint="start the server on a machine with Slurm's commands",
            )
        self._refused_jobs: dict[str, RefusedJob] = {}
        self._queried_at: dict[str, float] = {}
        self._jobs_by_name: dict[str, ListedJob] = {}
        self._listed_at = float("-inf")
        self._listed_names: frozenset[str] = frozenset()

    def submit(self, name: str, entrypoint: str) -> None:
        """Submit the batch script at the path `entrypoint`, unless Slurm already lists the name.

        `name` is the job's name in the script.
        """
        # An earlier call may have been accepted although its answer was lost.
        if isinstance(self.get_state(name), ListedJob):
            return
        process = _run_command(["sbatch", "--parsable", entrypoint])
        self._listed_at = float("-inf")
        if process.returncode:
            message = _last_line(process.stderr)
            if _is_away(message):
                raise _make_unavailable(message)
            self._refused_jobs[name] = RefusedJob(message)

    def stop(self, name: str) -> None:
        """Have Slurm send SIGTERM to a job, and SIGKILL after its KillWait; repeatable."""
        match self.get_state(name):
            case ListedJob(state=state) as job if not job.is_ended and state != "COMPLETING":
                _run_command(["scancel", str(job.number)])
                self._listed_at = float("-inf")

    def get_state(self, name: str) -> SlurmJobState:
        """Return the state of a job."""
        if refused_job := self._refused_jobs.get(name):
            return refused_job
        now = time.monotonic()
        self._queried_at[name] = now
        if name not in self._listed_names or now - self._listed_at > _LISTING_SECONDS:
            self._queried_at = {
                job_name: queried_at
                for job_name, queried_at in self._queried_at.items()
                if now - queried_at < _NAMES_SECONDS
            }
            self._listed_names = frozenset(self._queried_at)
            self._jobs_by_name = _list_jobs(self._listed_names)
            self._listed_at = time.monotonic()
        return self._jobs_by_name.get(name, UnlistedJob())


def _list_jobs(names: Iterable[str]) -> dict[str, ListedJob]:
    command = ["squeue", "--noheader", "--states=all", f"--user={os.getuid()}"]
    command += [f"--name={','.join(sorted(names))}", "--format=%A|%T|%r|%j"]
    process = _run_command(command)
    if process.returncode:
        raise _make_unavailable(_last_line(process.stderr))
    jobs: dict[str, ListedJob] = {}
    for line in process.stdout.splitlines():
        try:
            number, state, reason, name = line.split("|", 3)
            job = ListedJob(int(number), state, "" if reason == "None" else reason)
        except ValueError as error:
            raise _make_unavailable(f"squeue said {line[:_SHOWN_CHARS]!r}") from error
        # Two jobs have one name if the first was submitted and its answer was lost. Only one of
        # them gets the claim and runs the trainer.
        if name not in jobs or _order_key(job) > _order_key(jobs[name]):
            jobs[name] = job
    return jobs


def _order_key(job: ListedJob) -> int:
    """Return the sort key of a job: 3 running, 2 pending, 1 failed, 0 completed.

    It orders several jobs with the same name.
    """
    if job.is_ended:
        return int(job.state != "COMPLETED")
    return 2 if job.state == "PENDING" else 3


def _run_command(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _make_unavailable(f"{command[0]}: no answer in {_TIMEOUT_SECONDS:g} s") from error
    except OSError as error:
        raise _make_unavailable(f"{command[0]}: {error.strerror}") from error


def _make_unavailable(message: str) -> Unavailable:
    return Unavailable(f"Slurm cannot be reached: {message}")


def _is_away(message: str) -> bool:
    return any(word in message.lower() for word in _AWAY)


def _last_line(text: str) -> str:
    """Return the last line of a command's error output, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_SHOWN_CHARS] if lines else "no message"

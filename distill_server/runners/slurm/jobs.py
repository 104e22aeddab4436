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
# One squeue answers for all jobs that are looked at in a round; a name that nobody has looked at
# for a minute is not asked for any more.
_LISTING_SECONDS, _NAMES_SECONDS = 1.0, 60.0
_SHOWN_CHARS = 200
# What sbatch says if the controller is away; anything else is about the job.
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
class Absent:
    """squeue answered and did not list the job, which is no proof that Slurm has lost it."""


@dataclass(frozen=True)
class Refused:
    """sbatch refused the job, with this message."""

    message: str


@dataclass(frozen=True)
class Present:
    """The job as squeue lists it: its number, its state such as PENDING, and Slurm's reason."""

    number: int
    state: str
    reason: str = ""

    @property
    def ended(self) -> bool:
        """Whether no process of the job is left."""
        return self.state in _ENDED


Answer = Absent | Refused | Present


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
                hint="run the server where jobs of Slurm are submitted",
            )
        self._refused: dict[str, Refused] = {}
        self._asked: dict[str, float] = {}
        self._listed: dict[str, Present] = {}
        self._listed_at = float("-inf")
        self._listed_names: frozenset[str] = frozenset()

    def submit(self, name: str, entrypoint: str) -> None:
        """Submit the batch script `entrypoint`; no effect if Slurm already lists the name.

        The name is that in the script.
        """
        # An earlier call may have been accepted although its answer was lost.
        if isinstance(self.look(name), Present):
            return
        done = _called(["sbatch", "--parsable", entrypoint])
        self._listed_at = float("-inf")
        if done.returncode:
            message = _shown(done.stderr)
            if _is_away(message):
                raise _unavailable(message)
            self._refused[name] = Refused(message)

    def stop(self, name: str) -> None:
        """Have Slurm send SIGTERM to a job, and SIGKILL after its KillWait; repeatable."""
        match self.look(name):
            case Present(state=state) as job if not job.ended and state != "COMPLETING":
                _called(["scancel", str(job.number)])
                self._listed_at = float("-inf")

    def look(self, name: str) -> Answer:
        """Return the state of a job."""
        if refused := self._refused.get(name):
            return refused
        now = time.monotonic()
        self._asked[name] = now
        if name not in self._listed_names or now - self._listed_at > _LISTING_SECONDS:
            self._asked = {n: at for n, at in self._asked.items() if now - at < _NAMES_SECONDS}
            self._listed_names = frozenset(self._asked)
            self._listed = _listing(self._listed_names)
            self._listed_at = time.monotonic()
        return self._listed.get(name, Absent())


def _listing(names: Iterable[str]) -> dict[str, Present]:
    command = ["squeue", "--noheader", "--states=all", f"--user={os.getuid()}"]
    command += [f"--name={','.join(sorted(names))}", "--format=%A|%T|%r|%j"]
    done = _called(command)
    if done.returncode:
        raise _unavailable(_shown(done.stderr))
    listed: dict[str, Present] = {}
    for line in done.stdout.splitlines():
        try:
            number, state, reason, name = line.split("|", 3)
            found = Present(int(number), state, "" if reason == "None" else reason)
        except ValueError as error:
            raise _unavailable(f"squeue said {line[:_SHOWN_CHARS]!r}") from error
        # Of two with one name, one was submitted while nobody knew of the other, and only one of
        # them does anything.
        if name not in listed or _rank(found) > _rank(listed[name]):
            listed[name] = found
    return listed


def _rank(job: Present) -> int:
    """Order jobs of one name: what runs, waits, was stopped; then what has done nothing."""
    if job.ended:
        return int(job.state != "COMPLETED")
    return 2 if job.state == "PENDING" else 3


def _called(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
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
        raise _unavailable(f"{command[0]}: no answer in {_TIMEOUT_SECONDS:g} s") from error
    except OSError as error:
        raise _unavailable(f"{command[0]}: {error.strerror}") from error


def _unavailable(message: str) -> Unavailable:
    return Unavailable(f"Slurm cannot be reached: {message}")


def _is_away(message: str) -> bool:
    return any(word in message.lower() for word in _AWAY)


def _shown(text: str) -> str:
    """Return the last line of what a command said of its error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_SHOWN_CHARS] if lines else "no message"

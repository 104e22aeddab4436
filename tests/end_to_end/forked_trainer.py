"""The real trainer in forked processes, which saves the time of its imports.

Tests with `launched=True`, and those of `distill run` and of the server, start the command itself.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from clients.runs.directory import RunDirectory
from clients.runs.launch import trainer_command
from protos.rpc import failpoints
from tests.end_to_end.processes import Attempt, Launched
from tests.forks import Forks

# (event, text, n): die at the n-th Python audit event with this name ("open", "os.rename") and the
# text in one of its arguments.
Death = tuple[str, str, int]


class Forked(Attempt):
    def __init__(
        self,
        run: RunDirectory,
        number: int,
        *,
        dying: int = 0,
        failpoint: str = "",
        death: Death | None = None,
    ) -> None:
        """`dying`: the rank of the process in which `failpoint` and `death` are armed."""
        super().__init__(run, number)
        world = run.config().processes
        group = run.logs(number) / "group"
        self._forks = Forks(world, group, train, run.path, number, dying, failpoint, death)

    def poll(self) -> int | None:
        return self._forks.poll()

    def wait(self) -> int:
        codes = self.wait_for_all()
        return next((code for code in codes if code), 0)

    def wait_for_all(self) -> list[int | None]:
        """Return the exit codes of the processes; None for those that had to be killed."""
        return self._forks.wait(240)

    def pid(self, rank: int = 0) -> int:
        """Return the process id of one rank."""
        pid = self._forks.processes[rank].pid
        assert pid is not None
        return pid

    def wait_for_survivor(self, rank: int) -> int:
        """Return the exit code of one process, which is not killed when another one dies."""
        process = self._forks.processes[rank]
        process.join(60)
        assert process.exitcode is not None, self.log
        return process.exitcode

    def kill(self) -> None:
        self._forks.kill()


@contextmanager
def trainer(
    run: RunDirectory, attempt: int = 1, *, launched: bool = False, **options: Any
) -> Iterator[Attempt]:
    running_attempt = Launched(run, attempt) if launched else Forked(run, attempt, **options)
    try:
        yield running_attempt
    finally:
        running_attempt.kill()


def run_attempt(
    run: RunDirectory, number: int, dying: int = 0, failpoint: str = ""
) -> list[int | None]:
    """Run an attempt; return the exit codes. `failpoint` is armed in the process `dying`."""
    return Forked(run, number, dying=dying, failpoint=failpoint).wait_for_all()


def kill_after_checkpoint(run: RunDirectory, count: int = 1) -> None:
    """Train until checkpoint number `count` is renamed into place, which kills the main process.

    A test that waited for the checkpoint and then killed might find that the trainer has ended.
    """
    with trainer(run, failpoint=f"checkpoint-renamed:kill:{count}") as process:
        assert process.wait() == -signal.SIGKILL, process.log


def finish(run: RunDirectory, attempt: int = 1, *, launched: bool = False) -> RunDirectory:
    """Train to the end, without interruption and without a warning."""
    with trainer(run, attempt, launched=launched) as process:
        assert process.wait() == 0, process.log
        assert "Warning" not in process.log
    status = run.read_status()
    assert status is not None
    # For captures and evaluations the data determine the number of steps.
    steps = run.config().max_steps or status.max_steps
    assert (status.verdict, status.step) == ("succeeded", steps)
    return run


def train(path: Path, number: int, dying: int, failpoint: str, death: Death | None) -> None:
    with RunDirectory(path).log_file(number).open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    warnings.simplefilter("error")
    if os.environ.get("RANK", "0") == str(dying):
        failpoints.arm(failpoint)
        if death is not None:
            _die_at(*death)
    *_, program, _, _, _ = trainer_command(path, attempt=number, processes=1)
    sys.argv = [program, str(path), "--attempt", str(number)]
    package = find_spec(program)
    assert package is not None
    module = f"{program}.__main__" if package.submodule_search_locations else program
    code = importlib.import_module(module).main()
    if code:
        sys.exit(code)


def _die_at(event: str, text: str, count: int) -> None:
    remaining_events = count

    def count_event(name: str, values: tuple[Any, ...]) -> None:
        nonlocal remaining_events
        if name == event and any(text in str(value) for value in values):
            remaining_events -= 1
            if remaining_events == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count_event)

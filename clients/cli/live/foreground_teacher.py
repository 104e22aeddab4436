"""The teacher that `distill run` starts for a job with `teacher.model`, and stops with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from clients.cli.output import Output
from clients.config.kinds import AnyJob, started_teacher
from clients.runs.directory import RunDirectory
from clients.runs.launch import teacher_command
from clients.runs.started_teacher import write_address
from protos.errors import InternalFault, InvalidInput

_LISTENS = re.compile(r"^teacher listening on (\S+)$", re.MULTILINE)
_SECONDS_BETWEEN_POLLS = 0.1
_SECONDS_TO_STOP = 20.0
# Reads a process group, and ends it when the standard input ends: when all processes that hold its
# other end have ended, in whatever way.
_GUARD = (
    'read group || exit; cat > /dev/null; kill -s TERM -- "-$group"; sleep 20; '
    'kill -s KILL -- "-$group"'
)


@contextmanager
def foreground_teacher(
    config: AnyJob, run: RunDirectory, output: Output
) -> Iterator[Sequence[int]]:
    """Run the teacher of the job, if it needs one to be started, while the block runs.

    Yields the file descriptors that the trainer must inherit: if this process is killed, the
    teacher ends with the trainer. Its log is teacher.log in the run directory. Inside, SIGTERM and
    SIGHUP raise KeyboardInterrupt, as SIGINT does; use it in the main thread. Raises InvalidInput
    with its reason if it cannot start.
    """
    teacher = started_teacher(config)
    if teacher is None:
        yield ()
        return
    file = run.path / "teacher.log"
    # A closed terminal or a `kill` must not leave the teacher behind.
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        with _guard() as held:
            process = _start(teacher_command(teacher, port=0), file, held)
            try:
                with output.stage(f"starting a teacher for {teacher.model}"):
                    write_address(run.path, _address(process, file))
                yield (held,)
            finally:
                _stop(process)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(command: Sequence[str], file: Path, held: int) -> subprocess.Popen[bytes]:
    """Start the teacher, which itself tells the guard of `held` its process group first.

    So no moment is left in which this process could be killed and the teacher stay.
    """
    with file.open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            # A session of its own: after a Ctrl-C the trainer still needs its teacher.
            start_new_session=True,
            # Runs in the new process, after its session was made and before its program.
            preexec_fn=lambda: os.write(held, b"%d\n" % os.getpid()),
        )


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_SECONDS_TO_STOP)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _guard() -> Iterator[int]:
    """Yield a file descriptor for the number of a process group, in a line.

    If this process is killed, the group ends with all processes that hold the descriptor.
    """
    end, held = os.pipe()
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _GUARD],
        stdin=end,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(end)
    try:
        yield held
    finally:
        with suppress(ProcessLookupError):
            os.killpg(guard.pid, signal.SIGKILL)
        guard.wait()
        os.close(held)


def _address(process: subprocess.Popen[bytes], file: Path) -> str:
    """Wait until the teacher listens, however long its model takes to load."""
    while True:
        over = process.poll() is not None
        said = file.read_text(errors="replace")
        if found := _LISTENS.search(said):
            return found[1]
        if over:
            break
        time.sleep(_SECONDS_BETWEEN_POLLS)
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    if errors:
        raise InvalidInput(errors[-1].removeprefix("error: "), field="teacher.model")
    raise InternalFault(
        f"the teacher ended with exit code {process.returncode}", hint=f"read {file}"
    )

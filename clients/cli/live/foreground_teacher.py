"""Starts and stops the teacher of a `distill run`, or waits for teachers at their addresses."""

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
from clients.config.kinds import AnyJob
from clients.preflight.teachers import adapter_of, field_of, services_of
from clients.runs.directory import RunDirectory
from clients.runs.launch import teacher_command
from clients.runs.started_services import write_address
from clients.teacher.client import TeacherClient, TeacherNotReady
from protos.errors import DistillError, InternalFault, InvalidInput, Unavailable

_LISTENS = re.compile(r"^teacher listening on (\S+)$", re.MULTILINE)
_SECONDS_BETWEEN_POLLS = 0.1
_SECONDS_BETWEEN_CALLS = 1.0
_SECONDS_TO_STOP = 20.0
# Reads the number of a process group, and ends the group at the end of the standard input: when all
# processes that hold the other end of the pipe have ended, even if they were killed.
_GUARD = (
    'read group || exit; cat > /dev/null; kill -s TERM -- "-$group"; sleep 20; '
    'kill -s KILL -- "-$group"'
)


@contextmanager
def foreground_teacher(
    config: AnyJob, run: RunDirectory, output: Output
) -> Iterator[Sequence[int]]:
    """Run the teacher of the job during the block, if the job needs one. Only for the main thread.

    Yields file descriptors that the trainer must inherit. A guard process stops the teacher when
    this process and the trainer have both exited, even if this process was killed. The teacher
    writes its log to teacher.log in the run directory. During the block, SIGTERM and SIGHUP raise
    KeyboardInterrupt, as SIGINT does.

    Raises InvalidInput with the teacher's error text if the teacher cannot start.
    """
    teacher = config.started_teacher
    if teacher is None:
        yield ()
        return
    file = run.path / "teacher.log"
    # A closed terminal or a `kill` must not leave the teacher behind.
    numbers = (signal.SIGTERM, signal.SIGHUP)
    previous_handlers = {
        number: signal.signal(number, signal.default_int_handler) for number in numbers
    }
    try:
        with _start_guard() as guard_pipe:
            process = _start_teacher(teacher_command(teacher, port=0), file, guard_pipe)
            try:
                with output.stage(f"starting a teacher for {teacher.model}"):
                    write_address(run.path, _wait_for_address(process, file))
                yield (guard_pipe,)
            finally:
                _stop_teacher(process)
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def wait_for_teachers(config: AnyJob, output: Output) -> None:
    """Wait until the teacher services of the job answer. Print their state meanwhile.

    The wait has no limit while a teacher loads its model. Raises Unavailable if a teacher gives no
    answer for `teacher.patience_seconds`.
    """
    if config.teacher_link is None:
        return
    patience = config.teacher_link.patience_seconds
    for name, address in services_of(config).items():
        with TeacherClient(address, field=field_of(name), adapter=adapter_of(config)) as client:
            answered_at, sentence = time.monotonic(), ""
            while problem := _find_absence(client):
                if isinstance(problem, TeacherNotReady):
                    answered_at = time.monotonic()
                elif time.monotonic() - answered_at >= patience:
                    problem.message += f" for {patience:g} s (teacher.patience_seconds)"
                    raise problem
                if problem.message != sentence:
                    sentence = problem.message
                    output.say(f"WAITING {field_of(name)}: {sentence}")
                time.sleep(_SECONDS_BETWEEN_CALLS)


def _find_absence(client: TeacherClient) -> Unavailable | None:
    """Return the error if the teacher does not answer, or is not ready yet; otherwise None.

    Any other error, such as a refused token, also gives None: the trainer reports it.
    """
    try:
        client.info()
    except Unavailable as error:
        return error
    except DistillError:
        return None
    return None


def _start_teacher(command: Sequence[str], file: Path, guard_pipe: int) -> subprocess.Popen[bytes]:
    """Start the teacher process, with its output in `file`, and return the process.

    The new process writes its process group to `guard_pipe` before it runs the teacher. The guard
    can therefore stop the teacher even if this process is killed right after the start.
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
            preexec_fn=lambda: os.write(guard_pipe, b"%d\n" % os.getpid()),
        )


def _stop_teacher(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_SECONDS_TO_STOP)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _start_guard() -> Iterator[int]:
    """Start a guard process, and yield a file descriptor (a pipe) for the number of a process
    group.

    The process to guard writes the number of its process group and a line break to the descriptor.
    The guard stops this process group when all processes that hold the descriptor have exited.
    """
    end, guard_pipe = os.pipe()
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _GUARD],
        stdin=end,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(end)
    try:
        yield guard_pipe
    finally:
        with suppress(ProcessLookupError):
            os.killpg(guard.pid, signal.SIGKILL)
        guard.wait()
        os.close(guard_pipe)


def _wait_for_address(process: subprocess.Popen[bytes], file: Path) -> str:
    """Wait until the teacher listens, and return its HOST:PORT.

    The wait has no time limit, because loading a model can take long.
    """
    while True:
        has_ended = process.poll() is not None
        log_text = file.read_text(encoding="utf-8", errors="replace")
        if match := _LISTENS.search(log_text):
            return match[1]
        if has_ended:
            break
        time.sleep(_SECONDS_BETWEEN_POLLS)
    errors = [line for line in log_text.splitlines() if line.startswith("error: ")]
    if errors:
        raise InvalidInput(errors[-1].removeprefix("error: "), field="teacher.model")
    raise InternalFault(
        f"the teacher ended with exit code {process.returncode}", hint=f"read {file}"
    )

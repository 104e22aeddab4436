"""`python -m MODULE ...` without its imports: a Popen whose process is forked, see tests/forks.py.

The module runs as `__main__` with the command's arguments, environment, directory and streams. What
only a real start can show is for the tests that do not use this.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from typing import Any

from protos.rpc import failpoints
from tests.forks import Descriptor, fork, fork_from, forking_address

MODULES = {
    "benchmarks.loss.long_sequences",
    "benchmarks.offline.reference",
    "clients",
    "distill_server",
    "student_trainer",
    "student_trainer.exam",
    "student_trainer.exam.job",
    "student_trainer.rollout_service",
    "student_trainer.tools.accuracy",
    "student_trainer.tools.addition",
    "student_trainer.tools.pretrain",
    "teacher_service",
    "teacher_service.capture",
    "tests.distill_server.dashboard.scripted_site",
    "tests.distill_server.scripted_server",
    "tests.faults.dying",
    "tests.teacher_service.http.impatient",
    "tests.teacher_service.serving.gated_teacher",
}
# The arguments of Popen._execute_child after the first.
_ARGUMENT_NAMES = (
    *("executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo"),
    *("creationflags", "shell", "stdin_read", "stdin_write", "stdout_read", "stdout_write"),
    *("stderr_read", "stderr_write", "restore_signals", "gid", "gids", "uid", "umask"),
    *("start_new_session", "process_group"),
)


class ForkedPython(subprocess.Popen[Any]):
    """Forks commands `python -m MODULE` for MODULES, and starts all other commands normally."""

    _forked: BaseProcess | None = None

    def _execute_child(self, args: Any, *positional: Any) -> None:
        arguments = dict(zip(_ARGUMENT_NAMES, positional, strict=True))
        argv = forkable_command(args)
        if argv is None or arguments["preexec_fn"] or arguments["pass_fds"]:
            super()._execute_child(args, *positional)  # type: ignore[misc]
            return
        streams = [
            number if arguments[name] == -1 else arguments[name]
            for number, name in enumerate(("stdin_read", "stdout_write", "stderr_write"))
        ]
        wait_for_child, notify = os.pipe()
        self._forked = fork(
            _run_as_command,
            argv,
            os.path.abspath(arguments["cwd"] or os.getcwd()),
            dict(os.environ if arguments["env"] is None else arguments["env"]),
            [Descriptor(number) for number in (*streams, notify)],
            arguments["start_new_session"],
            forking_address(),
        )
        assert self._forked.pid is not None
        self.pid = self._forked.pid
        self._child_created = True
        descriptors_to_close = [notify]  # ends of pipes that only the child uses
        for parent_end, child_index in (("stdin_write", 0), ("stdout_read", 1), ("stderr_read", 2)):
            if arguments[parent_end] != -1:
                descriptors_to_close.append(streams[child_index])
        if (devnull := getattr(self, "_devnull", None)) is not None:
            descriptors_to_close.append(devnull)
        for descriptor in dict.fromkeys(descriptors_to_close):
            os.close(descriptor)
        os.read(wait_for_child, 1)  # until the child has closed its end
        os.close(wait_for_child)

    def _internal_poll(self, *args: Any, **options: Any) -> int | None:
        if self._forked is None:
            exit_code: int | None = super()._internal_poll(*args, **options)  # type: ignore[misc]
            return exit_code
        if self.returncode is None:
            self.returncode = self._forked.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._forked is None:
            exit_code: int = super()._wait(timeout=timeout)  # type: ignore[misc]
            return exit_code
        self._forked.join(timeout)
        code = self._internal_poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code


def run_forked(
    command: list[str], *, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the command as subprocess.run does, with captured text."""
    pipe = subprocess.PIPE
    with ForkedPython(command, stdout=pipe, stderr=pipe, text=True, **options) as process:
        try:
            output, error_output = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, error_output)


def forkable_command(args: object) -> list[str] | None:
    """Return the module and the arguments of a command that can be forked, otherwise None."""
    interpreter, *words = map(os.fspath, args) if isinstance(args, list | tuple) else [""]
    if words[:1] == ["-P"]:
        del words[0]
    is_forkable = interpreter == sys.executable and words[:1] == ["-m"] and words[1] in MODULES
    return words[1:] if is_forkable else None


def _run_as_command(
    argv: list[str],
    directory: str,
    environment: Mapping[str, str],
    descriptors: list[Descriptor],
    new_session: bool,
    address: str,
) -> None:
    if new_session:
        os.setsid()
    *streams, notify = descriptors
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor.number, number)
        os.close(descriptor.number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    buffering = 1 if "PYTHONUNBUFFERED" in environment else -1
    sys.stdout = open(1, "w", closefd=False, buffering=buffering)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    if environment.get("PYTHONWARNINGS") == "error":
        warnings.simplefilter("error")
    failpoints.arm(environment.get(failpoints.VARIABLE, ""))
    fork_from(address)
    subprocess.Popen = ForkedPython  # type: ignore[misc]
    os.close(notify.number)
    module, *sys.argv[1:] = argv
    # `runpy` warns about modules that are already imported.
    sys.modules.pop(f"{module}.__main__", None)
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()

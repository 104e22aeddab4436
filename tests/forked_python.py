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
    "student_trainer.tools.pretrain",
    "teacher_service",
    "teacher_service.capture",
    "tests.distill_server.dashboard.scripted_site",
    "tests.distill_server.scripted_server",
    "tests.teacher_service.http.impatient",
    "tests.teacher_service.serving.gated_teacher",
}
# The arguments of Popen._execute_child after the first.
_GIVEN = (
    *("executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo"),
    *("creationflags", "shell", "stdin_read", "stdin_write", "stdout_read", "stdout_write"),
    *("stderr_read", "stderr_write", "restore_signals", "gid", "gids", "uid", "umask"),
    *("start_new_session", "process_group"),
)


class ForkedPython(subprocess.Popen[Any]):
    """Forks commands `python -m` of MODULES, and starts all others."""

    _forked: BaseProcess | None = None

    def _execute_child(self, args: Any, *rest: Any) -> None:
        given = dict(zip(_GIVEN, rest, strict=True))
        argv = forkable(args)
        if argv is None or given["preexec_fn"] or given["pass_fds"]:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        streams = [
            number if given[name] == -1 else given[name]
            for number, name in enumerate(("stdin_read", "stdout_write", "stderr_write"))
        ]
        ready, told = os.pipe()
        self._forked = fork(
            _become,
            argv,
            os.path.abspath(given["cwd"] or os.getcwd()),
            dict(os.environ if given["env"] is None else given["env"]),
            [Descriptor(number) for number in (*streams, told)],
            given["start_new_session"],
            forking_address(),
        )
        assert self._forked.pid is not None
        self.pid = self._forked.pid
        self._child_created = True
        ends = [told]  # of pipes, that are the child's alone
        for mine, its in (("stdin_write", 0), ("stdout_read", 1), ("stderr_read", 2)):
            if given[mine] != -1:
                ends.append(streams[its])
        if (devnull := getattr(self, "_devnull", None)) is not None:
            ends.append(devnull)
        for end in dict.fromkeys(ends):
            os.close(end)
        os.read(ready, 1)  # until it is what it will be
        os.close(ready)

    def _internal_poll(self, *args: Any, **options: Any) -> int | None:
        if self._forked is None:
            found: int | None = super()._internal_poll(*args, **options)  # type: ignore[misc]
            return found
        if self.returncode is None:
            self.returncode = self._forked.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._forked is None:
            found: int = super()._wait(timeout=timeout)  # type: ignore[misc]
            return found
        self._forked.join(timeout)
        code = self._internal_poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code


def run_forked(
    command: list[str], *, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run, with captured text."""
    pipe = subprocess.PIPE
    with ForkedPython(command, stdout=pipe, stderr=pipe, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def forkable(args: object) -> list[str] | None:
    """The module of such a command, and its arguments."""
    interpreter, *rest = map(os.fspath, args) if isinstance(args, list | tuple) else [""]
    if rest[:1] == ["-P"]:
        del rest[0]
    known = interpreter == sys.executable and rest[:1] == ["-m"] and rest[1] in MODULES
    return rest[1:] if known else None


def _become(
    argv: list[str],
    directory: str,
    environment: Mapping[str, str],
    descriptors: list[Descriptor],
    new_session: bool,
    address: str,
) -> None:
    if new_session:
        os.setsid()
    *streams, told = descriptors
    for number, given in enumerate(streams):
        os.dup2(given.number, number)
        os.close(given.number)
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
    os.close(told.number)
    module, *sys.argv[1:] = argv
    # Of what is there already, `runpy` warns.
    sys.modules.pop(f"{module}.__main__", None)
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()

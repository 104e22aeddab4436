"""Starts the processes of vLLM, and ends this program if one of them dies.

The teacher and the rollout service, which both run vLLM, use this module.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from protos.errors import InvalidInput
from protos.extras import install_command

log = logging.getLogger(__name__)

# vLLM usually stops in about 5 s; after this limit its processes are killed.
SHUTDOWN_SECONDS = 15.0
_WATCH_SECONDS = 0.2
_DEATH_EXIT_CODE = 1
_ENVIRONMENT = {
    # A process that has threads must not be forked.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # On a CPU, use as many threads as --threads sets, and do not bind threads to cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # On a CPU, layers with weights of 4 bits would round their inputs to 8 bits, although the model
    # does not specify this rounding.
    "VLLM_CPU_INT4_W4A8": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}


def require_vllm() -> None:
    """Raise InvalidInput if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise InvalidInput(
            "vllm is not installed",
            field="--engine",
            hint=f"{install_command('vllm')}, or use --engine hf",
        )


def set_environment() -> None:
    """Set the environment variables that vLLM reads, without changing those that are already set.

    Call this before vllm is imported.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def executor(processes: int) -> str | None:
    """Return the value of vLLM's `distributed_executor_backend`; None: the default of vLLM.

    `processes`: the number of workers. A single worker shall run in the process of vLLM's
    scheduler. On a CPU, vLLM by default starts a separate process for the worker. The scheduler
    then waits for that process in a busy loop, which takes a core from the worker. The separate
    process has no benefit: it only sets OpenMP's variables, which `set_environment` and `--threads`
    set. The value is the full name of the class, because vLLM replaces the short name "uni" on a
    CPU.
    """
    return "vllm.v1.executor.uniproc_executor.UniProcExecutor" if processes == 1 else None


@contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """During the block, send stdout (file descriptor 1) to stderr, also for processes that start in
    it.

    Libraries in vLLM's processes print to stdout, but other programs parse the stdout of this
    process.
    """
    sys.stdout.flush()
    saved_stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)


class DeathWatch:
    """Exits this process with code 1 when a process of vLLM dies. A supervisor then restarts it.

    The process exits without sending errors to its clients. A client would treat an error as the
    final result of its request. After a broken connection, the client sends the request again, to
    any service.
    """

    def __init__(self, llm: Any, program: str) -> None:
        """Watch the processes of vLLM from now on, on a thread.

        `llm`: an AsyncLLM. `program`: the program's name in the log, such as "this teacher".
        """
        self._llm = llm
        self._program = program
        self._is_closed = False
        threading.Thread(target=self._poll, name="vllm-watch", daemon=True).start()

    def check(self) -> None:
        """Exit this process if a process of vLLM has died."""
        if self._llm.errored and not self._is_closed:
            self.exit("a process of vLLM died")

    def exit(self, reason: str) -> None:
        """Log the reason, and exit this process with code 1."""
        log.critical("%s; %s exits with code 1; start the program again", reason, self._program)
        os._exit(_DEATH_EXIT_CODE)

    def close(self) -> None:
        """End the watch. Call this before the program stops vLLM itself."""
        self._is_closed = True

    def _poll(self) -> None:
        """Check vLLM several times per second.

        vLLM can die between requests, or without answering a request.
        """
        while not self._is_closed:
            time.sleep(_WATCH_SECONDS)
            self.check()


def die_with(pid: int) -> None:
    """Exit this process, a worker of vLLM, when the process that started vLLM (`pid`) has ended.

    A killed program cannot stop vLLM's processes, and they would keep the device memory. When this
    worker exits, vLLM stops its other processes.
    """
    program = os.pidfd_open(pid)

    def wait() -> None:
        select.select([program], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()

"""Processes that are there at once, forked from one that has imported what they need: alone, or
several as one group over gloo.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver, get_context, reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preloaded"])
_ROOT = Path(__file__).parents[1]


def fork(target: Callable[..., object], *arguments: Any) -> BaseProcess:
    """Start `target(*arguments)` in a process of its own and return the process."""
    sys.audit("os.fork")  # the fork itself happens in another process
    streams = Descriptor(1), Descriptor(2)
    process = _CONTEXT.Process(target=_run_target, args=(streams, target, *arguments))
    with contextlib.chdir(_ROOT):  # so that the child can import `tests`
        process.start()
    return process


def forking_address() -> str:
    """Return the address of the process from which all others are forked."""
    server: Any = forkserver._forkserver
    with contextlib.chdir(_ROOT):
        server.ensure_running()
    return str(server._forkserver_address)


def fork_from(address: str) -> None:
    """Use the existing fork server instead of starting another one."""
    server: Any = forkserver._forkserver
    server._forkserver_address = address
    if server._forkserver_alive_fd is None:  # in a process that was not forked by that server
        _, server._forkserver_alive_fd = os.pipe()
    server.ensure_running = lambda: None


def _run_target(
    streams: tuple[Descriptor, Descriptor], target: Callable[..., object], *arguments: Any
) -> None:
    gc.freeze()  # a garbage collection would copy the shared pages
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.number, number)
        os.close(stream.number)
    target(*arguments)


class Descriptor:
    """An open file that is passed to a forked process as an argument."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _receive_descriptor, (reduction.DupFd(self.number),)


def _receive_descriptor(duplicate: Any) -> Descriptor:
    return Descriptor(duplicate.detach())


class Forks:
    """Runs `target(*arguments)` in `world` processes of one torch.distributed group."""

    def __init__(
        self, world: int, group: Path, target: Callable[..., object], *arguments: Any
    ) -> None:
        """`group`: a path for the rendezvous file, which must not exist yet."""
        self.processes = [
            fork(_run_rank, rank, world, group, target, arguments) for rank in range(world)
        ]

    def poll(self) -> int | None:
        """Return None while processes run and none has failed, else 0 or the first failing code."""
        codes = self._codes()
        failed = next((code for code in codes if code), None)
        return 0 if failed is None and None not in codes else failed

    def wait(self, seconds: float = 600) -> list[int | None]:
        """Return the exit codes. If a process fails, kill the others, as `accelerate launch`."""
        deadline = time.monotonic() + seconds
        try:
            while self.poll() is None:
                assert time.monotonic() < deadline, "they do not end"
                time.sleep(0.005)
            return self._codes()
        finally:
            self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def _codes(self) -> list[int | None]:
        return [process.exitcode for process in self.processes]


def _run_rank(
    rank: int, world: int, group: Path, target: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if world == 1:
        target(*arguments)
        return
    rank_variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
    }
    os.environ.update({name: str(value) for name, value in rank_variables.items()})
    # A rendezvous by file needs no port, which another program could take.
    dist.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=world)
    target(*arguments)
    dist.destroy_process_group()

"""Processes of one group over gloo, forked from one that has imported what they need: several
processes at the price of none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["student_trainer.assembly", "tests.trainer.anchors"])


class Forks:
    """`target(*arguments)` as each of `world` processes, which know each other."""

    def __init__(
        self, world: int, group: Path, target: Callable[..., object], *arguments: Any
    ) -> None:
        """`group`: a file that is not there yet, and must outlive none of them."""
        self.processes: list[BaseProcess] = [
            _CONTEXT.Process(target=_enter, args=(rank, world, group, target, arguments))
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def wait(self) -> list[int | None]:
        """Exit codes; when one fails, the others are killed, as by `accelerate launch`."""
        deadline = time.monotonic() + 600
        try:
            while any(code is None for code in self._codes()) and not any(self._codes()):
                assert time.monotonic() < deadline, "they do not end"
                time.sleep(0.005)
            return self._codes()
        finally:
            for process in self.processes:
                process.kill()
                process.join()

    def _codes(self) -> list[int | None]:
        return [process.exitcode for process in self.processes]


def _enter(
    rank: int, world: int, group: Path, target: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    if world == 1:
        target(*arguments)
        return
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in here.items()})
    # By a file: no port that somebody else could take.
    dist.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=world)
    target(*arguments)
    dist.destroy_process_group()

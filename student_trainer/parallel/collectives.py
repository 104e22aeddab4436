"""Operations that all processes call together: shared numbers and shared errors.

If a process stopped while others are in a collective, they would wait until the time limit of
`time_limit.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch.distributed import HashStore  # type: ignore[attr-defined]

from protos.errors import DistillError, error_of
from student_trainer.parallel.other_processes import select_interface

_ERROR_BYTES = 4096  # of an error, sent to the other processes
Found = TypeVar("Found")


def make_accelerator(limit: timedelta, *, cpu_offload: bool = False) -> Accelerator:
    """Collective. Return the Accelerator of this process, on a GPU if there is one.

    Its collectives fail after `limit`. Products of float32 matrices may use TF32 on a GPU.

    `cpu_offload`: collectives take tensors in host memory too, and a process without a launcher is
    a group of one, which FSDP2 needs.
    """
    torch.backends.cuda.matmul.allow_tf32 = True
    select_interface()
    timeout = InitProcessGroupKwargs(timeout=limit)
    cuda = torch.cuda.is_available()
    if cpu_offload and not torch.distributed.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        alone: dict[str, Any] = {}
        if "RANK" not in os.environ:
            alone = {"store": HashStore(), "rank": 0, "world_size": 1}
        torch.distributed.init_process_group(backend, timeout=limit, **alone)
    return Accelerator(cpu=not cuda, kwargs_handlers=[timeout])


def largest(accelerator: Accelerator, number: int) -> int:
    """Collective. Return the largest `number` of all processes."""
    if accelerator.num_processes == 1:
        return number
    mine = torch.tensor([number], device=accelerator.device)
    return int(accelerator.gather(mine).max())


def raise_on_all_ranks(accelerator: Accelerator, work: Callable[[], Found]) -> Found:
    """Collective. Run `work` and return its result; an error on any rank is raised on all ranks.

    So no rank leaves the others waiting in a later collective. A rank whose own `work` raised a
    DistillError raises that error. Every other rank raises the error of the lowest such rank, its
    texts cut to 4096 bytes in all. `work` must catch or convert other exceptions: they are not
    shared.
    """
    fault: DistillError | None = None
    try:
        found = work()
    except DistillError as error:
        fault = error
    if not largest(accelerator, int(fault is not None)):
        return found
    shared = _first_error(accelerator, fault) if accelerator.num_processes > 1 else None
    raised = fault or shared
    assert raised is not None
    raise raised


def _first_error(accelerator: Accelerator, fault: DistillError | None) -> DistillError:
    """Collective. Return the error of the lowest rank that has one."""
    said = () if fault is None else (fault.code, fault.field, fault.hint, fault.message)
    text = "\0".join(said).encode()[:_ERROR_BYTES].ljust(_ERROR_BYTES, b"\0")
    mine = torch.tensor(list(text), dtype=torch.uint8, device=accelerator.device)
    everyone = accelerator.gather(mine).reshape(-1, _ERROR_BYTES)
    first = next(line for line in everyone.cpu() if line.any())
    code, field, hint, message = bytes(first.tolist()).decode("utf-8", "ignore").split("\0", 3)
    return error_of(code, message.rstrip("\0"), field=field, hint=hint)

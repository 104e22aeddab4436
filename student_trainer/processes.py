"""Several processes as one: none may leave while another waits for it."""

from __future__ import annotations

from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from protos.errors import DistillError, Unavailable

# Longer than a save to a slow disk or one rank's longest answers; a lost rank is noticed at once.
_COLLECTIVE_TIMEOUT = timedelta(hours=1)


def make_accelerator() -> Accelerator:
    timeout = InitProcessGroupKwargs(timeout=_COLLECTIVE_TIMEOUT)
    return Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[timeout])


def largest(accelerator: Accelerator, number: int) -> int:
    """The largest of all processes' numbers, in every process."""
    if accelerator.num_processes == 1:
        return number
    mine = torch.tensor([number], device=accelerator.device)
    return int(accelerator.gather(mine).max())


def raise_together(accelerator: Accelerator, fault: DistillError | None) -> None:
    """Raise in every process if one has a fault: it must not leave the others in a collective."""
    if largest(accelerator, int(fault is not None)):
        raise fault or Unavailable("another process of this job met a fault; its log says which")

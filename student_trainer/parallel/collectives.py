"""Several processes as one: none may leave while another waits for it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from protos.errors import DistillError, error_of

# Longer than a save to a slow disk or one rank's longest answers; a lost rank is noticed at once.
_COLLECTIVE_TIMEOUT = timedelta(hours=1)
_TOLD_BYTES = 4096  # of a fault, to the other processes
Found = TypeVar("Found")


def make_accelerator() -> Accelerator:
    timeout = InitProcessGroupKwargs(timeout=_COLLECTIVE_TIMEOUT)
    return Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[timeout])


def largest(accelerator: Accelerator, number: int) -> int:
    """The largest of all processes' numbers, in every process."""
    if accelerator.num_processes == 1:
        return number
    mine = torch.tensor([number], device=accelerator.device)
    return int(accelerator.gather(mine).max())


def together(accelerator: Accelerator, work: Callable[[], Found]) -> Found:
    """What `work` finds; its fault in one process is raised in every one: it must not leave the
    others in a collective. All must call it.

    Those without a fault raise the first one's: whoever is heard first tells what happened.
    """
    fault: DistillError | None = None
    try:
        found = work()
    except DistillError as error:
        fault = error
    if not largest(accelerator, int(fault is not None)):
        return found
    told = _first_told(accelerator, fault) if accelerator.num_processes > 1 else None
    raised = fault or told
    assert raised is not None
    raise raised


def _first_told(accelerator: Accelerator, fault: DistillError | None) -> DistillError:
    said = () if fault is None else (fault.code, fault.field, fault.hint, fault.message)
    text = "\0".join(said).encode()[:_TOLD_BYTES].ljust(_TOLD_BYTES, b"\0")
    mine = torch.tensor(list(text), dtype=torch.uint8, device=accelerator.device)
    everyone = accelerator.gather(mine).reshape(-1, _TOLD_BYTES)
    first = next(line for line in everyone.cpu() if line.any())
    code, field, hint, message = bytes(first.tolist()).decode("utf-8", "ignore").split("\0", 3)
    return error_of(code, message.rstrip("\0"), field=field, hint=hint)

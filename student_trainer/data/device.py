"""Asynchronous copies of host tensors to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`; the tensor itself if it is there.

    A copy to a GPU starts from pinned memory and is queued behind earlier operations. Without
    pinned memory, the host would wait until all of them are done. A copy from a GPU is complete.
    """
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=not tensor.is_cuda)

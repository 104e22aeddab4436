"""A buffer on a GPU that the trainer fills, and that engines on the same GPU read (CUDA IPC)."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from typing import Any

import torch
from torch import Tensor, UntypedStorage


class SharedBucket:
    """The buffer in one process: that of the trainer, or an engine's mapping of it."""

    def __init__(self, data: Tensor) -> None:
        """`data`: uint8 on the GPU, a whole allocation."""
        self._data = data
        self.size = data.numel()

    @property
    def handle(self) -> bytes:
        """What `opened` needs in another process. Plain values: nothing is unpickled."""
        storage: Any = self._data.untyped_storage()
        values = storage._share_cuda_()
        coded = [b64encode(of).decode() if isinstance(of, bytes) else of for of in values]
        return json.dumps(coded).encode()

    @staticmethod
    def opened(handle: bytes, device: torch.device) -> SharedBucket:
        """Map the buffer of another process, which lies on the GPU `device` of this one."""
        _, *values = json.loads(handle)
        decoded = [b64decode(of) if isinstance(of, str) else of for of in values]
        place = device.index if device.index is not None else torch.cuda.current_device()
        storage = UntypedStorage._new_shared_cuda(place, *decoded)
        return SharedBucket(torch.empty(0, dtype=torch.uint8, device=device).set_(storage))

    def fill(self, piece: Tensor) -> None:
        """Copy a piece into the buffer, and wait until it is there."""
        self._data[: piece.numel()].copy_(piece)
        torch.cuda.synchronize(self._data.device)

    def read(self, piece: Tensor) -> None:
        """Copy the buffer into a piece, and wait until it may be filled again."""
        piece.copy_(self._data[: piece.numel()])
        torch.cuda.synchronize(self._data.device)

"""A buffer on a GPU that the trainer fills, and that engines on the same GPU read (CUDA IPC)."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from typing import Any

import torch
from torch import Tensor, UntypedStorage


class SharedBucket:
    """The buffer in one process: the trainer's own buffer, or an engine's mapping of it."""

    def __init__(self, data: Tensor) -> None:
        """`data`: uint8 on the GPU, the only tensor of its allocation."""
        self._data = data
        self.size = data.numel()

    @property
    def handle(self) -> bytes:
        """The argument of `map_handle` in another process, as JSON: nothing is unpickled."""
        storage: Any = self._data.untyped_storage()
        values = storage._share_cuda_()
        encoded_values = [
            b64encode(value).decode() if isinstance(value, bytes) else value for value in values
        ]
        return json.dumps(encoded_values).encode()

    @staticmethod
    def map_handle(handle: bytes, device: torch.device) -> SharedBucket:
        """Map the buffer of another process, which is on the GPU `device` of this process."""
        _, *values = json.loads(handle)
        decoded_values = [b64decode(value) if isinstance(value, str) else value for value in values]
        device_index = device.index if device.index is not None else torch.cuda.current_device()
        storage = UntypedStorage._new_shared_cuda(device_index, *decoded_values)
        return SharedBucket(torch.empty(0, dtype=torch.uint8, device=device).set_(storage))

    def fill(self, piece: Tensor) -> None:
        """Copy a piece into the buffer, and wait for the copy."""
        self._data[: piece.numel()].copy_(piece)
        torch.cuda.synchronize(self._data.device)

    def read(self, piece: Tensor) -> None:
        """Copy the buffer into a piece, and wait for the copy; the buffer may then be refilled."""
        piece.copy_(self._data[: piece.numel()])
        torch.cuda.synchronize(self._data.device)

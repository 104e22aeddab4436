"""Where an update would wait for a GPU, recorded on a CPU.

A machine without a GPU has one device, so `Synchronizations` marks the tensors that would be on the
GPU: the student's weights and gradients, what `.to(device)` or a `device=` argument returns, and
each result of an operation on a marked tensor. It records each operation that makes the host wait
for a marked tensor, or that copies a host tensor without `non_blocking`.

Not seen: waits inside an operator that only exists on a GPU (a fused kernel, NCCL), and whether the
host memory of a non-blocking copy is pinned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCT = Path(__file__).parents[3] / "student_trainer"

# The sizes of their results depend on values, or the result is a number of the host.
_WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "repeat_interleave",
    "bincount",
    "equal",
}
# Methods that read memory of the host, which no dispatch shows.
_READS = {"tolist", "numpy", "__array__"}


@dataclass(frozen=True)
class Synchronization:
    """kind: the operation. file, function, line: of the product's innermost frame."""

    kind: str
    file: str
    function: str
    line: int

    @property
    def place(self) -> tuple[str, str]:
        return self.file, self.function


class Synchronizations:
    """A context that records the synchronizations of updates of `model` in this thread."""

    def __init__(self, model: nn.Module) -> None:
        self.events: list[Synchronization] = []
        self.copies = 0  # non-blocking copies to the device
        # The storages are kept, so that no later tensor has the address of an earlier one.
        self._storages: dict[int, torch.UntypedStorage] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            self.mark(tensor)
            if tensor.grad is not None:
                self.mark(tensor.grad)
        self._modes = (_Calls(self), _Operations(self))

    def __enter__(self) -> Self:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def mark(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage

    def unmark(self, tensor: Tensor) -> None:
        self._storages.pop(tensor.untyped_storage()._cdata, None)

    def is_on_device(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage()._cdata in self._storages

    def record(self, kind: str) -> None:
        frame = sys._getframe(1)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PRODUCT):
                file = str(path.relative_to(PRODUCT.parent))
                name = frame.f_code.co_qualname
                self.events.append(Synchronization(kind, file, name, frame.f_lineno))
                return
            frame = frame.f_back  # type: ignore[assignment]
        self.events.append(Synchronization(kind, "", "", 0))


class _Operations(TorchDispatchMode):
    """Marks the results of operations on marked tensors, forward and backward."""

    def __init__(self, record: Synchronizations) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_marked = [self._record.is_on_device(tensor) for tensor in tensors]
        if any(is_marked) and (kind := _wait(func.overloadpacket.__name__, tensors, is_marked)):
            self._record.record(kind)
        output = func(*args, **(kwargs or {}))
        if any(is_marked) and not (func is torch.ops.aten.copy_.default and not is_marked[0]):
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor):
                    self._record.mark(leaf)
        return output


def _wait(name: str, tensors: Sequence[Tensor], is_marked: Sequence[bool]) -> str:
    """Return why the operation waits; "" if it does not."""
    if name in _WAITING:
        return name
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        values = 0 if name == "index" else 1
        indices = tensors[1 : len(tensors) - values]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            return f"{name} by a mask"
    if name in ("index", "index_put", "index_put_", "_index_put_impl_", "copy_") and any(
        not marked and tensor.ndim for tensor, marked in zip(tensors, is_marked, strict=True)
    ):
        return f"{name} of host and device"
    return ""


class _Calls(TorchFunctionMode):
    """Sees `device` arguments, and reads that are no operations."""

    def __init__(self, record: Synchronizations) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs, record = kwargs or {}, self._record
        name = getattr(func, "__name__", "")
        own = args[0] if args and isinstance(args[0], Tensor) else None
        is_marked = record.is_on_device(own)
        output = func(*args, **kwargs)
        if name in _READS and is_marked:
            record.record(name)
        elif name == "cpu" and is_marked:
            record.record("cpu")
            output = output.clone()
            record.unmark(output)
        elif name == "new_tensor" and is_marked:
            record.record("new_tensor")
            record.mark(output)
        elif own is not None and name == "to" and not is_marked:
            if any(isinstance(value, torch.device) for value in (*args, *kwargs.values())):
                if kwargs.get("non_blocking"):
                    record.copies += 1
                else:
                    record.record("copy to the device")
                output = output.clone()
                record.mark(output)
        elif isinstance(output, Tensor) and isinstance(kwargs.get("device"), torch.device):
            if name in ("tensor", "as_tensor"):
                record.record(name)
            record.mark(output)
        return output

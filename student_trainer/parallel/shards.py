"""The shards of tensors that FSDP2 and tensor parallelism divide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a sharded one. Collective if `tensor` is sharded.

    A tensor that is not sharded is returned unchanged.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh.ndim == 2:  # first the dimension divided last, as torch recommends
        tensor = tensor.redistribute(placements=[Replicate(), tensor.placements[1]])
    return tensor.full_tensor()


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of `tensor`, not a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensors(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Collective. Return each tensor unsharded; sharded ones are copied to the CPU.

    Processes with `keep` false take part but return {}. Names that share a tensor share it in the
    result too.
    """
    gathered_tensors: dict[int, Tensor] = {}
    for tensor_id, tensor in {id(tensor): tensor for tensor in tensors.values()}.items():
        gathered = full_tensor(tensor.detach())
        if keep:
            gathered_tensors[tensor_id] = (
                gathered.cpu() if isinstance(tensor, DTensor) else gathered
            )
    return {name: gathered_tensors[id(tensor)] for name, tensor in tensors.items()} if keep else {}


def rows_of_part(rows: int, part: int, parts: int) -> slice:
    """Return the rows of `part` of `parts`, as `torch.chunk` and FSDP2 divide them.

    The last parts have fewer rows, or none.
    """
    rows_per_part = -(-rows // parts)
    return slice(min(part * rows_per_part, rows), min((part + 1) * rows_per_part, rows))


def own_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Return the position of this process's shard in the full tensor: a slice of each dimension.

    Returns (), which selects everything, if the tensor is not sharded.
    """
    if not isinstance(tensor, DTensor):
        return ()
    slices = [slice(0, size) for size in tensor.shape]
    mesh = tensor.device_mesh
    # FSDP2, the first dimension of the mesh, divides the parts that tensor parallelism leaves.
    for dim, placement in reversed(list(enumerate(tensor.placements))):
        if placement != Replicate():
            sharded_dim = cast(Shard, placement).dim
            span = slices[sharded_dim]
            size = span.stop - span.start
            part = rows_of_part(size, mesh.get_local_rank(dim), mesh.size(dim))
            slices[sharded_dim] = slice(span.start + part.start, span.start + part.stop)
    return tuple(slices)


def tensor_with_shard(shard: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with the placement of `like` whose local shard is `shard`."""
    shard = shard.to(like.device)
    if not isinstance(like, DTensor):
        return shard
    mesh, shape, stride = like.device_mesh, like.shape, like.stride()
    return DTensor.from_local(shard, mesh, like.placements, shape=shape, stride=stride)


def tensor_with_rows(rows: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with the local rows `rows`, sharded by rows like `like`.

    The tensor has as many rows as `like`. The shape of a row may differ.
    """
    rows = rows.to(like.device)
    if not isinstance(like, DTensor):
        return rows
    shape = torch.Size((len(like), *rows.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, like.device_mesh, like.placements, shape=shape, stride=stride)

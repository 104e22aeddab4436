"""Shards of tensors that are divided by FSDP2 and tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the unsharded tensor. Collective if `tensor` is sharded.

    A tensor that is not sharded is returned unchanged.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh.ndim == 2:  # first the dimension divided last, as torch recommends
        tensor = tensor.redistribute(placements=[Replicate(), tensor.placements[1]])
    return tensor.full_tensor()


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of `tensor`, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensors(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Collective. Return the unsharded tensors by name. Tensors that were sharded are on the CPU.

    `keep`: whether this process needs the tensors; if it is False, the process takes part in the
    collective and gets {}. If a tensor has several names, the result has it once, under the same
    names.
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
    """Return the rows of part `part` if `rows` rows are divided into `parts` parts.

    The division is that of `torch.chunk` and FSDP2: the last parts have fewer rows, or none.
    """
    rows_per_part = -(-rows // parts)
    return slice(min(part * rows_per_part, rows), min((part + 1) * rows_per_part, rows))


def own_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Return where this process's shard is in the full tensor, as one slice per dimension.

    Returns () if the tensor is not sharded. As an index, () selects the whole tensor.
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
    """Return a tensor that is sharded like `like`, and has the local shard `shard`."""
    shard = shard.to(like.device)
    if not isinstance(like, DTensor):
        return shard
    mesh, shape, stride = like.device_mesh, like.shape, like.stride()
    return DTensor.from_local(shard, mesh, like.placements, shape=shape, stride=stride)


def tensor_with_rows(rows: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that is sharded by rows like `like`, and has the local rows `rows`.

    The full tensor has as many rows as `like`. The rows may have another shape than those of
    `like`.
    """
    rows = rows.to(like.device)
    if not isinstance(like, DTensor):
        return rows
    shape = torch.Size((len(like), *rows.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, like.device_mesh, like.placements, shape=shape, stride=stride)

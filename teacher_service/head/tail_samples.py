"""Draws ids in proportion to weights, by inverse CDF. Shapes: n rows, V ids, M draws per row.

A float32 running sum over 150,000 probabilities has no digits left for the unlikely ids. Here the
weights are summed in groups of 64 in float32. The running sum over the group sums, and the running
sum within the selected group, are float64. The relative error of an id's probability is about 1e-6,
however small it is, and no second [n, V] tensor is allocated.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GROUP = 64
# Temporary memory for one group of weights, and for one draw.
_SUM_BYTES, _DRAW_BYTES = 32, 48 * _GROUP
_MAX_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the ids, int64 [n, M], that `uniforms` select by inverse CDF of the weights.

    weights [n, V] float32, finite and >= 0, not normalised; uniforms [n, M] float64 in [0, 1). An
    id of weight 0 is never drawn, unless every weight of the row is 0: then the last id is drawn.
    """
    parts = zip(*_split_rows(weights, uniforms), strict=True)
    return torch.cat([_draw(part, levels) for part, levels in parts])


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    running = running_sums(weights)
    return _draw_at(weights, running, levels_of(uniforms, running[:, -1:]))


def draw_at(weights: Tensor, running: Tensor, levels: Tensor) -> Tensor:
    """Return the ids [n, M] at the `levels` [n, M] of the running sums of weights [n, V].

    `running` is the result of `running_sums`. Each level, float64, is at least 0 and less than the
    last sum.
    """
    parts = zip(*_split_rows(weights, running, levels), strict=True)
    return torch.cat([_draw_at(*part) for part in parts])


def _split_rows(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Split the rows of `tensors` into parts, so that temporary tensors of a part are small.

    The first tensor has the weights, the last tensor the levels.
    """
    weights, levels = tensors[0], tensors[-1]
    row_bytes = _SUM_BYTES * weights.shape[1] // _GROUP + _DRAW_BYTES * levels.shape[1]
    split_rows = max(1, _MAX_BYTES[weights.device.type] // row_bytes)
    return [torch.split(tensor, split_rows) for tensor in tensors]


def _draw_at(weights: Tensor, running: Tensor, levels: Tensor) -> Tensor:
    vocab_size = weights.shape[1]
    groups, fractions = _find_entries(running, levels)
    ids = groups[:, :, None] * _GROUP + torch.arange(_GROUP, device=weights.device)
    is_padding = ids >= vocab_size
    group_weights = weights.gather(1, ids.clamp_(max=vocab_size - 1).flatten(1)).view(ids.shape)
    group_sums = _accumulate(group_weights.double().masked_fill_(is_padding, 0).flatten(0, 1))
    offsets, _ = _find_entries(group_sums, levels_of(fractions.view(-1, 1), group_sums[:, -1:]))
    return (groups * _GROUP + offsets.view(groups.shape)).clamp_(max=vocab_size - 1)


def running_sums(weights: Tensor) -> Tensor:
    """Return the running sums over groups of `weights`, float64 [n, G].

    The V weights of a row are added in G groups. Entry g is the sum of all weights of the groups 0
    to g.
    """
    return _accumulate(_sum_groups(weights).double())


def levels_of(shares: Tensor, total: Tensor) -> Tensor:
    """Return the levels [n, M] = `shares` * `total`, strictly below `total` [n, 1].

    `shares` are in [0, 1].
    """
    return level_below(shares * total, total)


def level_below(levels: Tensor, total: Tensor) -> Tensor:
    """Return `levels` [n, M], each at most the largest number below `total` [n, 1].

    Rounding can make a level equal to the total, and this level would be after the last entry.
    """
    return torch.minimum(levels, total.nextafter(torch.zeros_like(total)))


def _sum_groups(weights: Tensor) -> Tensor:
    count = weights.shape[1] // _GROUP
    grouped_ids = count * _GROUP
    sums = weights[:, :grouped_ids].view(len(weights), count, _GROUP).sum(-1)
    if grouped_ids == weights.shape[1]:
        return sums
    return torch.cat([sums, weights[:, grouped_ids:].sum(-1, keepdim=True)], 1)


def _accumulate(weights: Tensor) -> Tensor:
    # An entry of weight 0 must end exactly where the entry before it ends. A parallel sum may round
    # differently, so take the running maximum instead.
    return weights.cumsum(1).masked_fill_(weights == 0, 0).cummax(1).values


def _find_entries(running: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries [n, M] of the running sums [n, G] (float64) in which `levels` fall.

    Also returns the relative position of each level within its entry, in [0, 1].
    """
    index = torch.searchsorted(running, levels, right=True).clamp_(max=running.shape[1] - 1)
    entry_start = torch.where(index > 0, running.gather(1, (index - 1).clamp_(min=0)), 0)
    width = running.gather(1, index) - entry_start
    return index, torch.where(width > 0, (levels - entry_start) / width, 0)

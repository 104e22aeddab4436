"""Draws ids in proportion to weights, by inverse CDF. Shapes: n rows, V ids, M draws per row.

A float32 running sum over 150,000 probabilities has no digits left for the unlikely ids. Here the
weights are summed in groups of 64 in float32. The running sum over the group sums, and the running
sum within the selected group, are float64. The relative error of an id's probability is about 1e-6,
however small it is, and no second [n, V] tensor is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_GROUP = 64
# Temporary memory for one group of weights, and for one draw.
_SUM_BYTES, _DRAW_BYTES = 32, 48 * _GROUP
_MOST_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the ids, int64 [n, M], that `uniforms` select by inverse CDF of the weights.

    weights [n, V] float32, finite and >= 0, not normalised; uniforms [n, M] float64 in [0, 1). An
    id of weight 0 is never drawn, unless every weight of the row is 0: then the last id is drawn.
    """
    ids = [_draw(part, levels) for part, levels in _parts(weights, uniforms)]
    return torch.cat(ids)


def _parts(weights: Tensor, uniforms: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    a_row = _SUM_BYTES * weights.shape[1] // _GROUP + _DRAW_BYTES * uniforms.shape[1]
    size = max(1, _MOST_BYTES[weights.device.type] // a_row)
    return zip(torch.split(weights, size), torch.split(uniforms, size), strict=True)


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    vocab_size = weights.shape[1]
    groups, rest = _pick(_group_sums(weights).double(), uniforms)
    ids = groups[:, :, None] * _GROUP + torch.arange(_GROUP, device=weights.device)
    beyond = ids >= vocab_size
    found = weights.gather(1, ids.clamp_(max=vocab_size - 1).flatten(1)).view(ids.shape)
    within = found.double().masked_fill_(beyond, 0).flatten(0, 1)
    places, _ = _pick(within, rest.view(-1, 1))
    return (groups * _GROUP + places.view(groups.shape)).clamp_(max=vocab_size - 1)


def _group_sums(weights: Tensor) -> Tensor:
    count = weights.shape[1] // _GROUP
    whole = count * _GROUP
    sums = weights[:, :whole].view(len(weights), count, _GROUP).sum(-1)
    if whole == weights.shape[1]:
        return sums
    return torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], 1)


def _pick(weights: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Select entries of weights [n, G] (float64) by inverse CDF at levels [n, M] in [0, 1).

    Returns the indices [n, M], and the relative position of each level within its entry, in [0, 1].
    """
    running = weights.cumsum(1)
    # An entry of weight 0 must end exactly where the one before it ends. A parallel sum may round
    # differently, so take the running maximum instead.
    running = running.masked_fill_(weights == 0, 0).cummax(1).values
    total = running[:, -1:]
    # A level that is rounded up to the total would fall after the last entry.
    level = torch.minimum(levels * total, total.nextafter(torch.zeros_like(total)))
    index = torch.searchsorted(running, level, right=True).clamp_(max=weights.shape[1] - 1)
    before = torch.where(index > 0, running.gather(1, (index - 1).clamp_(min=0)), 0)
    width = running.gather(1, index) - before
    return index, torch.where(width > 0, (level - before) / width, 0)

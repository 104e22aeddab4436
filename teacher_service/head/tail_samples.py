"""Ids drawn in proportion to weights, by inverse CDF: shapes n rows, V vocabulary, M draws a row.

In float32 a running sum over 150,000 probabilities has no digits left for the unlikely ones. Here
sums of 64 weights are float32, and only the running sum over these, and the one within the 64 that
a number falls into, are float64: an id's share is its weight to about 1e-6 of itself, however small
it is, and nothing [n, V] is made.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_GROUP = 64
# Of what is made for one group of weights, and for one draw.
_SUM_BYTES, _DRAW_BYTES = 32, 48 * _GROUP
_MOST_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The ids int64 [n, M] on which the numbers uniforms [n, M] (float64, in [0, 1)) fall when the
    weights [n, V] (float32, finite, >= 0) of a row are laid side by side and scaled to length 1.

    What weighs 0 is never drawn; where all do, the last id is.
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
    """On which of weights [n, G] (float64) each of levels [n, M] falls, and how far into it."""
    running = weights.cumsum(1)
    # What weighs nothing ends exactly where the one before it does: a parallel sum may differ.
    running = running.masked_fill_(weights == 0, 0).cummax(1).values
    total = running[:, -1:]
    # Rounded up to the total, a level would fall behind the last one.
    level = torch.minimum(levels * total, total.nextafter(torch.zeros_like(total)))
    index = torch.searchsorted(running, level, right=True).clamp_(max=weights.shape[1] - 1)
    before = torch.where(index > 0, running.gather(1, (index - 1).clamp_(min=0)), 0)
    width = running.gather(1, index) - before
    return index, torch.where(width > 0, (level - before) / width, 0)

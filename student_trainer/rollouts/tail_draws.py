"""Draws ids from the tail of the sampling policy, for tail mode `bucket+draws` of `topk_kl`.

Stratified inverse CDF: one uniform number u per row gives the levels (i + u)/M, i = 0..M-1. Each id
z of the tail is drawn M p(z)/P_t times in expectation, where P_t is the tail mass, and the number
of draws of an id differs from that by less than 1. Shapes: N rows, V ids, k head ids, M draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

from student_trainer.data.rollout import TailDraws

# Ids are selected in two stages: first a group of ids, then an id of the group. This takes one pass
# over the vocabulary for the sums of groups, and running sums over V/64 groups and over 64 ids.
_GROUP = 64
# Up to this vocabulary, running sums over all ids take less time than two stages.
_ONE_STAGE = 1024


def draw_tail(weights: Tensor, head_ids: Tensor, uniforms: Tensor, count: int) -> TailDraws:
    """Draw `count` ids per row, in proportion to `weights`, from the ids that are not in the head.

    weights [N, V]: probabilities, not necessarily normalised; overwritten with 0 at the head ids.
    Use float64: the running sums have the same dtype, and the relative error of an id's probability
    is about that of one sum. head_ids [N, k] int64. uniforms [N]: in [0, 1), in the dtype of the
    weights. `count`: M.

    An id of weight 0 is never drawn. In a row whose tail has no weight, all ids are 0 with the
    log-prob +inf, which `topk_kl` ignores. The ids of a row are in ascending order. The log-probs
    have the dtype of the weights.
    """
    weights.scatter_(1, head_ids, 0)
    vocab_size = weights.shape[1]
    strata = torch.arange(count, device=weights.device, dtype=weights.dtype)
    levels = (strata + uniforms[:, None]) / count
    if vocab_size <= _ONE_STAGE:
        ids, _ = _invert_cdf(weights, levels)
        total = weights.sum(1, keepdim=True)
    else:
        sums = _group_sums(weights)
        ids = _invert_cdf_in_groups(weights, sums, levels)
        total = sums.sum(1, keepdim=True)
    drawn_weights = weights.gather(1, ids)
    is_drawn = drawn_weights > 0
    logprobs = drawn_weights.log() - total.log()
    return TailDraws(
        torch.where(is_drawn, ids, 0).int(),
        torch.where(is_drawn, logprobs, torch.inf).to(weights.dtype),
    )


def _invert_cdf_in_groups(weights: Tensor, sums: Tensor, levels: Tensor) -> Tensor:
    """Select ids [N, M] by inverse CDF of weights [N, V] at levels [N, M], in two stages."""
    groups, levels = _invert_cdf(sums, levels)
    ids = groups[:, :, None] * _GROUP + torch.arange(_GROUP, device=weights.device)
    is_padding = ids >= weights.shape[1]
    ids = ids.clamp(max=weights.shape[1] - 1)
    members = weights.gather(1, ids.flatten(1)).view(ids.shape).masked_fill(is_padding, 0)
    positions, _ = _invert_cdf(members.flatten(0, 1), levels.reshape(-1, 1))
    return ids.gather(2, positions.view(*groups.shape, 1)).squeeze(2)


def _group_sums(weights: Tensor) -> Tensor:
    """Return the sums over groups of _GROUP ids, [N, V / _GROUP]; the last may be smaller."""
    grouped_size = weights.shape[1] // _GROUP * _GROUP
    sums = weights[:, :grouped_size].view(len(weights), grouped_size // _GROUP, _GROUP).sum(2)
    if grouped_size == weights.shape[1]:
        return sums
    return torch.cat([sums, weights[:, grouped_size:].sum(1, keepdim=True)], 1)


def _invert_cdf(weights: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Select entries of weights [n, G] by inverse CDF at levels [n, M] in [0, 1].

    Returns the indices [n, M], and the relative position of each level within its entry, in [0, 1].
    """
    # An entry of weight 0 must end exactly where its predecessor ends. A parallel sum may round
    # differently, so take the running maximum instead.
    running_sums = weights.cumsum(1).masked_fill_(weights == 0, 0).cummax(1).values
    total = running_sums[:, -1:]
    # A level at the total would fall after the last entry.
    level = torch.minimum(levels * total, total.nextafter(torch.zeros_like(total)))
    index = torch.searchsorted(running_sums, level, right=True).clamp_(max=weights.shape[1] - 1)
    sums_before = torch.where(index > 0, running_sums.gather(1, (index - 1).clamp_(min=0)), 0)
    width = running_sums.gather(1, index) - sums_before
    return index, torch.where(width > 0, (level - sums_before) / width, 0)

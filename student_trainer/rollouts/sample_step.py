"""One step of sampling: from the logits of B sequences to their next tokens.

`sample_step` also records the log-probs, the head ids and the tail draws of the sampling policy.
All engines call `sample_step`, so equal logits and random numbers give equal tokens. `draw_tail`
draws ids from the tail of the policy, for tail mode `bucket+draws`.

Shapes: B sequences, V ids, k head ids, M draws. In `draw_tail`, N rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from student_trainer.data.sequence import TailDraws

# Ids are selected in two stages: first a group of ids, then an id of the group. This takes one pass
# over the vocabulary for the sums of groups, and running sums over V/64 groups and over 64 ids.
_GROUP = 64
# Up to this vocabulary, running sums over all ids take less time than two stages.
_ONE_STAGE = 1024


@dataclass(frozen=True)
class SampledStep:
    """One sampled token per sequence, and records of the policy, which is softmax(logits / T).

    - token_ids [B] int64: the sampled tokens.
    - logprobs [B] float32: the policy's log-probs of the tokens, in nats.
    - head_ids [B, k] int64: the policy's top-k ids.
    - draws: ids and log-probs [B, M]; None if there are none.
    """

    token_ids: Tensor
    logprobs: Tensor
    head_ids: Tensor
    draws: TailDraws | None


def sample_step(
    logits: Tensor,
    *,
    top_k: int,
    temperature: float,
    uniforms: Tensor | None,
    top_p: float = 1.0,
    draws: int = 0,
    draw_uniforms: Tensor | None = None,
    never: int | None = None,
) -> SampledStep:
    """Sample one token per row of logits [B, V] by inverse CDF, and record the policy.

    - uniforms [B] float64: random numbers in [0, 1); None takes the most likely tokens, without
      draws.
    - top_p: sample only from the nucleus with this total probability. The records describe the
      policy without this restriction.
    - draws: M, the number of ids to draw from the tail per token.
    - draw_uniforms [B] float64: random numbers for the draws; None draws none.
    - never: an id that must not be sampled. The recorded policy includes this id.
    """
    logprobs = (logits.float() / temperature).log_softmax(1)
    head_ids = logprobs.topk(top_k, dim=1).indices
    tail_draws = None
    if uniforms is None:
        sampled_ids = _exclude_id(logprobs, never, -torch.inf).argmax(1, keepdim=True)
    else:
        # float64: over a vocabulary of 150k, a float32 sum loses the unlikely tokens.
        probabilities = logprobs.double().exp()
        allowed = _exclude_id(probabilities, never, 0.0)
        nucleus_probabilities = nucleus(allowed, top_p) if top_p < 1 else allowed
        cumulative = nucleus_probabilities.cumsum(1)
        level = uniforms[:, None] * cumulative[:, -1:]
        sampled_ids = torch.searchsorted(cumulative, level, right=True)
        sampled_ids = sampled_ids.clamp(max=logits.shape[1] - 1)
        if draw_uniforms is not None:
            draws_float64 = draw_tail(probabilities, head_ids, draw_uniforms, draws)
            tail_draws = TailDraws(draws_float64.ids, draws_float64.logprobs.float())
    return SampledStep(
        sampled_ids.squeeze(1), logprobs.gather(1, sampled_ids).squeeze(1), head_ids, tail_draws
    )


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Set the probabilities [B, V] outside the nucleus to 0 (Holtzman et al., arXiv 1904.09751).

    The nucleus is the smallest set of most likely tokens with a total probability of at least
    `top_p`. It always contains the most likely token. The result is not normalised.
    """
    sorted_probabilities, ids = probabilities.sort(1, descending=True)
    mass_before = sorted_probabilities.cumsum(1) - sorted_probabilities
    return torch.zeros_like(probabilities).scatter_(
        1, ids, sorted_probabilities * (mass_before < top_p)
    )


def _exclude_id(values: Tensor, never: int | None, replacement: float) -> Tensor:
    """Return a copy of values [B, V] with `replacement` at the id `never`.

    If `never` is None, return `values` itself.
    """
    if never is None:
        return values
    copy = values.clone()
    copy[:, never] = replacement
    return copy


def draw_tail(weights: Tensor, head_ids: Tensor, uniforms: Tensor, count: int) -> TailDraws:
    """Draw `count` ids per row from the ids that are not in the head, in proportion to `weights`.

    - weights [N, V]: probabilities, not necessarily normalised. They are overwritten with 0 at the
      head ids. Use float64: the running sums have the same dtype, and the relative error of an id's
      probability is about that of one sum.
    - head_ids [N, k] int64.
    - uniforms [N]: in [0, 1), in the dtype of the weights.
    - count: M, the number of draws per row.

    Method: stratified inverse CDF. One uniform number u per row gives the levels (i + u)/M, i =
    0..M-1. Each id z of the tail is drawn M p(z)/P_t times in expectation, where P_t is the tail
    mass. The number of draws of an id differs from this expectation by less than 1.

    An id of weight 0 is never drawn. If the tail of a row has no weight, all its ids are 0 with the
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
    """Select ids [N, M] by inverse CDF of weights [N, V] at levels [N, M], in two stages.

    The first stage selects a group by `sums`, the second an id within the group.
    """
    groups, levels = _invert_cdf(sums, levels)
    ids = groups[:, :, None] * _GROUP + torch.arange(_GROUP, device=weights.device)
    is_padding = ids >= weights.shape[1]
    ids = ids.clamp(max=weights.shape[1] - 1)
    members = weights.gather(1, ids.flatten(1)).view(ids.shape).masked_fill(is_padding, 0)
    positions, _ = _invert_cdf(members.flatten(0, 1), levels.reshape(-1, 1))
    return ids.gather(2, positions.view(*groups.shape, 1)).squeeze(2)


def _group_sums(weights: Tensor) -> Tensor:
    """Return the sum of the weights of each group of _GROUP ids, [N, V / _GROUP] rounded up.

    The last group may be smaller.
    """
    grouped_size = weights.shape[1] // _GROUP * _GROUP
    sums = weights[:, :grouped_size].view(len(weights), grouped_size // _GROUP, _GROUP).sum(2)
    if grouped_size == weights.shape[1]:
        return sums
    return torch.cat([sums, weights[:, grouped_size:].sum(1, keepdim=True)], 1)


def _invert_cdf(weights: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Select entries of weights [n, G] by inverse CDF at levels [n, M] in [0, 1].

    Returns the indices [n, M], and the relative position of each level within its entry, from 0 to
    1.
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

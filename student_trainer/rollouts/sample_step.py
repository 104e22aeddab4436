"""One step of sampling: from the logits of B sequences to their next tokens and the records.

The samplers of all engines call it, so that the same logits and random numbers give the same
tokens. Shapes: B sequences, V ids, k head ids, M draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from student_trainer.data.rollout import TailDraws
from student_trainer.rollouts.tail_draws import draw_tail


@dataclass(frozen=True)
class SampledStep:
    """One token per sequence, and the policy that it was sampled from, softmax(logits / T).

    token_ids [B] int64. logprobs [B] float32: the policy's log-probs of the tokens, in nats.
    head_ids [B, k] int64: the policy's top-k ids. draws: ids and log-probs [B, M]; None if there
    are none.
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

    uniforms [B] float64: random numbers in [0, 1); None takes the most likely tokens, without
    draws. `top_p`: sample from the nucleus with this probability; all records are of the policy
    before it. `draws`: M. draw_uniforms [B] float64: random numbers of the draws; None draws none.
    `never`: an id that is not sampled; records are of the policy with it.
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
    """Zero the probabilities [B, V] outside the nucleus (Holtzman et al., arXiv 1904.09751).

    The nucleus is the smallest set of most likely tokens with a total probability of at least
    `top_p`; it always contains the most likely token. The result is not normalised.
    """
    sorted_probabilities, ids = probabilities.sort(1, descending=True)
    mass_before = sorted_probabilities.cumsum(1) - sorted_probabilities
    return torch.zeros_like(probabilities).scatter_(
        1, ids, sorted_probabilities * (mass_before < top_p)
    )


def _exclude_id(values: Tensor, never: int | None, replacement: float) -> Tensor:
    """Return values [B, V] with `replacement` at the id `never`; `values` itself if it is None."""
    if never is None:
        return values
    copy = values.clone()
    copy[:, never] = replacement
    return copy

"""The clipped policy gradient of PPO and GRPO, with a ratio per token or per sequence.

A is the advantage, p the student, and p_old the student before the first update of the step. The
loss of PPO (arXiv 1707.06347, equation 7) and GRPO (arXiv 2402.03300), with two clip bounds (DAPO,
arXiv 2503.14476), is:

    rho = p(y) / p_old(y)
    loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

A third bound (dual clip, arXiv 1912.09729, equation 5) limits the loss where A < 0: the ratio there
is at most dual_clip.

p_old may differ from the policy mu that sampled y, because of older weights, another precision or
another program. The clip limits how far the updates move away from p_old. The weight p_old(y)/mu(y)
of `off_policy.py` corrects for sampling from mu (decoupled PPO, arXiv 2110.00641, equation 2).

GSPO (arXiv 2507.18071) has one ratio per sequence: the geometric mean of the ratios of its tokens.
This module uses the form that the paper calls "GSPO-token". If all tokens of a sequence have the
same advantage and weight, the gradient equals the gradient of the sequence ratio. Otherwise each
token still has its own advantage.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from student_trainer.losses.rows import HIGHEST_LOG_RATIO, LOWEST_LOGPROB


def token_log_ratio(token_logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return log rho = log p(y) - log p_old(y) of each token, [N] in nats.

    The second policy may also be mu instead of p_old. Both arguments are log-probs [N] of the
    sampled tokens; values below LOWEST_LOGPROB are raised to it. The gradient flows through
    `token_logprobs` only.
    """
    log_p = token_logprobs.clamp(min=LOWEST_LOGPROB)
    return log_p - other_logprobs.detach().clamp(min=LOWEST_LOGPROB)


def sequence_log_ratio(token_logprobs: Tensor, old_logprobs: Tensor, sequence: Tensor) -> Tensor:
    """Return for each token the mean of log rho over the token's sequence, [N] in nats.

    `sequence` [N] int64: the index of each token's sequence, less than N. A call needs all tokens
    of a sequence, so the rows must come from `fused_linear_rows`. The gradient of the value of a
    token is the gradient of the log-prob of this token.
    """
    token_ratios = token_log_ratio(token_logprobs, old_logprobs)
    gradient_term = token_ratios - token_ratios.detach()
    # Sized by N (there are at most N sequences): reading their number would wait for the device.
    zeros = torch.zeros_like(token_ratios.detach())
    total = zeros.index_add(0, sequence, token_ratios.detach())
    length = zeros.index_add(0, sequence, torch.ones_like(zeros))
    return gradient_term + (total / length.clamp(min=1))[sequence]


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = math.inf,
) -> Tensor:
    """Return the clipped loss of each token, [N]; the gradient of a clipped token is exactly 0.

    - log_ratio [N]: the result of `token_log_ratio` or `sequence_log_ratio`.
    - advantages [N]: no gradient flows through them.
    - clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    - dual_clip: where the advantage is negative, the ratio is at most `dual_clip`, which is above
      1.
    """
    advantages = advantages.detach()
    ratio = log_ratio.clamp(max=HIGHEST_LOG_RATIO).exp()
    bounded = torch.where(
        advantages < 0,
        ratio.clamp(1 - clip_low, dual_clip),
        ratio.clamp(1 - clip_low, 1 + clip_high),
    )
    clipped = is_clipped(
        log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    return -torch.where(clipped, bounded.detach(), ratio) * advantages


@torch.no_grad()
def is_clipped(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = math.inf,
) -> Tensor:
    """Return a mask [N] that is True for clipped tokens.

    A token is clipped in three cases: its advantage is positive and its ratio above 1 + clip_high;
    its advantage is negative and its ratio below 1 - clip_low; or its advantage is negative and its
    ratio above `dual_clip`.
    """
    ratio = log_ratio.clamp(max=HIGHEST_LOG_RATIO).exp()
    above = (advantages > 0) & (ratio > 1 + clip_high)
    return above | ((advantages < 0) & ((ratio < 1 - clip_low) | (ratio > dual_clip)))

"""The clipped policy gradient of PPO and GRPO, with a ratio per token or per sequence.

A is the advantage, mu the policy that sampled y, p the student (PPO, arXiv 1707.06347, equation 7;
GRPO, arXiv 2402.03300; two clip bounds: DAPO, arXiv 2503.14476):

    rho = p(y) / mu(y)
    loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

The ratio of a sequence (GSPO, arXiv 2507.18071) is the geometric mean of the ratios of its tokens,
in the form that the paper calls "GSPO-token". If all tokens of a sequence have the same advantage
and weight, its gradient is that of the sequence ratio. Otherwise each token is still credited with
its own advantage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from student_trainer.losses.rows import HIGHEST_LOG_RATIO, LOWEST_LOGPROB


def token_log_ratio(token_logprobs: Tensor, sampling_logprobs: Tensor) -> Tensor:
    """Return log rho = log p(y) - log mu(y) of each token, [N] in nats.

    Both arguments: log-probs [N] of the sampled tokens, clamped to at least LOWEST_LOGPROB. The
    gradient flows through `token_logprobs` only.
    """
    log_p = token_logprobs.clamp(min=LOWEST_LOGPROB)
    return log_p - sampling_logprobs.detach().clamp(min=LOWEST_LOGPROB)


def sequence_log_ratio(
    token_logprobs: Tensor, sampling_logprobs: Tensor, sequence: Tensor
) -> Tensor:
    """Return the mean of log rho over each sequence, at each of its tokens, [N] in nats.

    `sequence` [N] int64: the index of each token's sequence, less than N. All tokens of a sequence
    must be in the call, so the rows must come from `fused_linear_rows`. The gradient at a token is
    that of its own log-prob.
    """
    of_token = token_log_ratio(token_logprobs, sampling_logprobs)
    own = of_token - of_token.detach()
    # Sized by N (there are at most N sequences): reading their number would wait for the device.
    none = torch.zeros_like(of_token.detach())
    total = none.index_add(0, sequence, of_token.detach())
    length = none.index_add(0, sequence, torch.ones_like(none))
    return own + (total / length.clamp(min=1))[sequence]


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Return the clipped loss of each token, [N]; the gradient of a clipped token is exactly 0.

    `log_ratio` [N]: of `token_log_ratio` or `sequence_log_ratio`. `advantages` [N]: no gradient
    flows through them. The ratio is clipped to [1 - clip_low, 1 + clip_high].
    """
    advantages = advantages.detach()
    ratio = log_ratio.clamp(max=HIGHEST_LOG_RATIO).exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped = is_clipped(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    return -torch.where(clipped, bounded.detach(), ratio) * advantages


@torch.no_grad()
def is_clipped(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Return which tokens are clipped, [N] bool.

    A token is clipped if its advantage is positive and its ratio above 1 + clip_high, or if its
    advantage is negative and its ratio below 1 - clip_low.
    """
    ratio = log_ratio.clamp(max=HIGHEST_LOG_RATIO).exp()
    above = (advantages > 0) & (ratio > 1 + clip_high)
    return above | ((advantages < 0) & (ratio < 1 - clip_low))


@torch.no_grad()
def importance_weights(
    token_logprobs: Tensor, sampling_logprobs: Tensor, clip: tuple[float, float] | None = None
) -> Tensor:
    """Return p(y) / mu(y) of each token, [N], detached: the weight of the sampled part of a KL.

    `clip`: the lowest and the highest weight. Clipping limits the variance and adds a bias. None:
    only bounded by e^HIGHEST_LOG_RATIO.
    """
    log_ratio = token_log_ratio(token_logprobs, sampling_logprobs)
    ratio = log_ratio.clamp(max=HIGHEST_LOG_RATIO).exp()
    return ratio if clip is None else ratio.clamp(*clip)

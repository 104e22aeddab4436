"""The clipped policy gradient of PPO and GRPO, with a ratio a token or a sequence.

With A the advantage, mu the policy that sampled y and p the student (PPO, arXiv 1707.06347; two
clips: DAPO, arXiv 2503.14476):

    rho = p(y) / mu(y)
    loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

A sequence's ratio (GSPO, arXiv 2507.18071) is the geometric mean of its tokens', in the form of
the paper's "GSPO-token": where all of its tokens have one advantage and one weight, its gradient is
that of the ratio itself, and else every token is still credited with its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from student_trainer.losses.rows import HIGHEST_LOG_RATIO, LOWEST_LOGPROB


def token_log_ratio(token_logprobs: Tensor, sampling_logprobs: Tensor) -> Tensor:
    """log rho [N] from the log-probs [N] of the sampled tokens."""
    log_p = token_logprobs.clamp(min=LOWEST_LOGPROB)
    return log_p - sampling_logprobs.detach().clamp(min=LOWEST_LOGPROB)


def sequence_log_ratio(
    token_logprobs: Tensor, sampling_logprobs: Tensor, sequence: Tensor
) -> Tensor:
    """The mean of log rho over each sequence, at every token of it, [N].

    sequence [N] int64 says which one a token is of; all rows of a sequence must be there, see
    `fused_linear_rows`. The gradient is that of the token's own log-prob.
    """
    of_token = token_log_ratio(token_logprobs, sampling_logprobs)
    own = of_token - of_token.detach()
    # There are no more sequences than tokens: asking for their number would wait for the device.
    none = torch.zeros_like(of_token.detach())
    total = none.index_add(0, sequence, of_token.detach())
    length = none.index_add(0, sequence, torch.ones_like(none))
    return own + (total / length.clamp(min=1))[sequence]


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """The loss of each token, [N]; a token beyond its clip has exactly zero gradient."""
    advantages = advantages.detach()
    ratio = log_ratio.clamp(max=HIGHEST_LOG_RATIO).exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped = is_clipped(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    return -torch.where(clipped, bounded.detach(), ratio) * advantages


@torch.no_grad()
def is_clipped(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Which tokens [N] have gone as far as they may in the direction of their advantage."""
    ratio = log_ratio.clamp(max=HIGHEST_LOG_RATIO).exp()
    above = (advantages > 0) & (ratio > 1 + clip_high)
    return above | ((advantages < 0) & (ratio < 1 - clip_low))


@torch.no_grad()
def importance_weights(
    token_logprobs: Tensor, sampling_logprobs: Tensor, clip: tuple[float, float] | None = None
) -> Tensor:
    """p(y)/mu(y) [N], detached, for the sampled part of a KL; `clip` bounds it, at some bias."""
    log_ratio = token_log_ratio(token_logprobs, sampling_logprobs)
    ratio = log_ratio.clamp(max=HIGHEST_LOG_RATIO).exp()
    return ratio if clip is None else ratio.clamp(*clip)

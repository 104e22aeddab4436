"""Importance weights for tokens that another policy sampled, and measures of its distance.

mu is the policy that sampled the token y, and p is the student. They differ if mu has older
weights, another precision or another program. The weight of y is rho = p(y)/mu(y). With it, the
mean of a term f(y) under mu equals its mean under p:

    E_mu[rho f(y)] = E_p[f(y)]

This is exact for one token after a given prefix. The prefixes are also sampled from mu. The product
of the weights of all prefix tokens would correct this too, but its variance grows exponentially
with the length.

A bound on the weights adds a bias and limits the variance:

- truncated: min(rho, C). TIS ("Your Efficient RL Framework Secretly Brings You Off-Policy RL
  Training", Yao et al. 2025), as in V-trace (IMPALA, arXiv 1802.01561, section 4.1).
- masked: rho within [low, high], otherwise 0. IcePop ("Every Step Evolves", arXiv 2510.18855).
"""

from __future__ import annotations

import torch
from torch import Tensor

from student_trainer.losses.policy import token_log_ratio
from student_trainer.losses.rows import HIGHEST_LOG_RATIO


@torch.no_grad()
def importance_weights(
    token_logprobs: Tensor,
    sampling_logprobs: Tensor,
    *,
    clip: tuple[float, float] | None = None,
    mask: tuple[float, float] | None = None,
) -> Tensor:
    """Return rho = p(y)/mu(y) of each token, [N], detached.

    - token_logprobs, sampling_logprobs [N]: log-probs in nats of the sampled tokens under p and mu.
    - clip: the lowest and the highest weight; (0, C) is TIS.
    - mask: weights outside this range become 0 (IcePop).

    Without `clip` and `mask`, weights are at most e^HIGHEST_LOG_RATIO.
    """
    log_ratio = token_log_ratio(token_logprobs, sampling_logprobs)
    weights = log_ratio.clamp(max=HIGHEST_LOG_RATIO).exp()
    if mask is not None:
        weights = torch.where((weights >= mask[0]) & (weights <= mask[1]), weights, 0)
    return weights if clip is None else weights.clamp(*clip)


@torch.no_grad()
def mismatch(token_logprobs: Tensor, sampling_logprobs: Tensor) -> dict[str, Tensor]:
    """Return measures of the distance between p and mu, each as (sum, number) [2] over N tokens.

    - ratio/mean: mean of rho. Its expectation is 1.
    - ratio/ess: 1 / mean of rho^2, the effective number of samples per token.
    - ratio/kl: mean of rho - 1 - log rho. It estimates KL(mu||p) in nats without bias and is never
      negative ("k3", Schulman 2020).

    The pairs (sum, number) of several processes may be added.
    """
    log_ratio = token_log_ratio(token_logprobs, sampling_logprobs)
    log_ratio = log_ratio.clamp(max=HIGHEST_LOG_RATIO)
    weights = log_ratio.exp()
    count = weights.new_full((), len(weights))
    return {
        "ratio/mean": torch.stack([weights.sum(), count]),
        "ratio/ess": torch.stack([count, weights.square().sum()]),
        "ratio/kl": torch.stack([(torch.expm1(log_ratio) - log_ratio).sum(), count]),
    }

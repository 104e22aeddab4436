"""KL estimators from the sampled token alone (k = 0): k1 to k5.

- y: the token, sampled from the student p. q is the teacher.
- w = q(y)/p(y).
- r = p(y)/sg(p(y)): its value is 1, its gradient is that of log p(y).
- sg: stop-gradient.

    kind   expression                value unbiased for   gradient unbiased for
    k1     -log w                    KL(p||q)             nothing (its mean is zero)
    k2     (log w)^2 / 2             nothing              KL(p||q)
    k3     -log w + w - 1            KL(p||q)             KL(q||p)
    k3++   r (-log w + w - 1)        KL(p||q)             KL(p||q)
    k4     r sg(-log w)              KL(p||q)             KL(p||q)
    k5     sg(w) log w + log r       KL(q||p)             KL(q||p)

If another policy mu sampled y, multiply the result by the importance weight sg(p(y)/mu(y)).

Sources: Schulman's note "Approximating KL divergence" (k1, k2, k3); EMA-PG, arXiv 2602.04417 (k3++,
k4, k5).
"""

from __future__ import annotations

from typing import Literal, assert_never

import torch
from torch import Tensor

from student_trainer.losses.rows import HIGHEST_LOG_RATIO, LOWEST_LOGPROB

Kind = Literal["k1", "k2", "k3", "k3++", "k4", "k5"]


def sampled_kl(student_logprobs: Tensor, teacher_logprobs: Tensor, kind: Kind) -> Tensor:
    """Return one KL estimate per token, [N] in nats; the module docstring lists the kinds.

    Both arguments are log-probs [N] in nats of the sampled tokens. The gradient flows only through
    the student's log-probs.
    """
    log_p = student_logprobs.clamp(min=LOWEST_LOGPROB)
    log_q = teacher_logprobs.detach().clamp(min=LOWEST_LOGPROB)
    log_w = log_q - log_p
    log_r = log_p - log_p.detach()
    match kind:
        case "k1":
            return -log_w
        case "k2":
            return log_w.square() / 2
        case "k3":
            return -log_w + torch.expm1(log_w.clamp(max=HIGHEST_LOG_RATIO))
        case "k3++":
            # The gradient of r k3 is grad log p(y) (-log w). Autograd would compute this gradient
            # as the difference of two terms of the size of w, which float32 rounds.
            k3 = -log_w + torch.expm1(log_w.clamp(max=HIGHEST_LOG_RATIO))
            return k3.detach() - log_r * log_w.detach()
        case "k4":
            return log_r.exp() * -log_w.detach()
        case "k5":
            w = log_w.detach().clamp(max=HIGHEST_LOG_RATIO).exp()
            return w * log_w + log_r
        case _:
            assert_never(kind)

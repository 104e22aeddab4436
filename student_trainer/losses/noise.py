"""The noise of the gradient of the Top-k KL with k head ids and M draws.

With tail mode `bucket+draws` and reverse KL, the part of a token's gradient that depends on the
draws z_1..z_M is, in the logits,

    (1/M) sum_i s_i (e_(z_i) - p),    s_i = p(z_i)/g(z_i) gap(z_i),

where e_z is the unit vector of id z and gap and g are those of `topk_kl`. The sample variance of
the terms estimates its variance from the rows alone, without any [N, V] tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from student_trainer.losses.rows import HIGHEST_LOG_RATIO, LOWEST_LOGPROB, Rows, index_equal_ids


@torch.no_grad()
def draw_noise(
    student: Rows, teacher: Rows, draw_ids: Tensor, draw_logprobs: Tensor, kl: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the variance of each token's gradient and the squared norm of its mean, both [N].

    Rows of N with M >= 2 draws, whose ids are `draw_ids` [N, M] int64 and whose log-probs
    `draw_logprobs` [N, M] are as in `topk_kl`. `kl` [N]: the KL(student||teacher) in nats, as
    `topk_kl` estimates it.

    The variance is unbiased for independent draws; stratified draws usually have less. The squared
    norm is exact except for the tail's share and `kl`, which are estimates.
    """
    p, q = (rows.map(lambda x: x.clamp(min=LOWEST_LOGPROB)) for rows in (student, teacher))
    assert p.sample_logprobs is not None, "rows have draws"
    assert q.sample_logprobs is not None, "rows have draws"
    log_p, log_ratio = p.sample_logprobs, p.sample_logprobs - q.sample_logprobs
    count = log_p.shape[1]
    ratio = (log_p - draw_logprobs).clamp(max=HIGHEST_LOG_RATIO).exp()  # 0 for placeholders
    draw_probs = log_p.exp()
    head_probs = p.head_logprobs.exp()
    scale = ratio * (log_ratio - (p.tail_logmass - q.tail_logmass)[:, None])
    squared_prob_sum = head_probs.square().sum(1) + (ratio * draw_probs).mean(1)  # sum of p^2
    # Equal ids share one entry of the vector.
    summed_scale = torch.zeros_like(scale).scatter_add_(1, index_equal_ids(draw_ids), scale)
    total = scale.sum(1)
    diagonal_terms = (scale.square() * (1 - 2 * draw_probs + squared_prob_sum[:, None])).sum(1)
    cross_terms = (
        summed_scale.square().sum(1)
        - 2 * total * (scale * draw_probs).sum(1)
        + squared_prob_sum * total.square()
    )
    variance = (diagonal_terms - cross_terms / count).clamp(min=0) / (count * (count - 1))
    head_ratio = p.head_logprobs - q.head_logprobs - kl[:, None]
    squared_norm = (head_probs * head_ratio).square().sum(1)
    squared_norm = squared_norm + (ratio * draw_probs * (log_ratio - kl[:, None]).square()).mean(1)
    return variance, squared_norm

"""How much better than expected a token was: from a group of answers, from a critic, from a KL."""

from __future__ import annotations

import torch
from torch import Tensor

from student_trainer.losses.policy import token_log_ratio
from student_trainer.losses.rows import Rows
from student_trainer.losses.topk import topk_kl


def group_advantages(rewards: Tensor, *, scale_by_std: bool, eps: float = 1e-6) -> Tensor:
    """(R - mean) / (std + eps) within each group of answers to one prompt, [G, n].

    rewards [G, n]; NaN where an answer has none: it is left out of its group's statistics, and its
    own advantage is zero, as are all of a group whose rewards are equal. The standard deviation is
    that of a sample (n - 1), as in GRPO's implementations (arXiv 2402.03300); without it: Dr. GRPO
    (arXiv 2503.20783).
    """
    known = rewards.isfinite()
    count = known.sum(1, keepdim=True)
    zero = torch.zeros_like(rewards)
    mean = torch.where(known, rewards, zero).sum(1, keepdim=True) / count.clamp(min=1)
    gap = torch.where(known, rewards - mean, zero)
    if scale_by_std:
        std = (gap.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        gap = gap / (std + eps)
    # A mean of equal numbers may be a rounding away from them, and so small a std would blow it up.
    return torch.where(flat_groups(rewards)[:, None], zero, gap)


def flat_groups(rewards: Tensor) -> Tensor:
    """Which groups [G] of rewards [G, n] teach nothing: their known ones are all the same."""
    known = rewards.isfinite()
    highest = torch.where(known, rewards, -torch.inf).amax(1)
    lowest = torch.where(known, rewards, torch.inf).amin(1)
    return highest <= lowest


def at_the_end(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Rewards of whole answers [S] as rewards of tokens [N]: all of it at the last one."""
    of_tokens = rewards.new_zeros(int(lengths.sum()))
    return of_tokens.index_put_((lengths.cumsum(0) - 1,), rewards)


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, sequence: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates (arXiv 1506.02438) and the critic's targets, each [N].

    rewards [N], of each token; values [N], the critic's before it; sequence [N], which answer it is
    of, the tokens of each in a row. After the last one nothing is left to come.

        delta_t = r_t + gamma V_(t+1) - V_t
        A_t = delta_t + gamma lam A_(t+1),  target_t = A_t + V_t
    """
    delta = rewards + gamma * _ahead(values, sequence, 1) - values
    # The recursion by doubling: after each turn an advantage reaches twice as far ahead.
    advantages, reach = delta, 1
    while reach < len(delta):
        advantages = advantages + (gamma * lam) ** reach * _ahead(advantages, sequence, reach)
        reach *= 2
    return advantages, advantages + values


def _ahead(values: Tensor, sequence: Tensor, by: int) -> Tensor:
    """What stands `by` tokens later in the same sequence, or 0, [N]."""
    later = torch.zeros_like(values)
    later[:-by] = torch.where(sequence[:-by] == sequence[by:], values[by:], 0)
    return later


@torch.no_grad()
def kl_reward(student: Rows, teacher: Rows) -> Tensor:
    """The reverse KL as an advantage of each token: -(log p(y) - log q(y)) + baseline, [N] in nats.

    Its policy gradient has the mean -grad KL(p||q) of the token's own distribution ("On-Policy
    Distillation", Thinking Machines). The baseline is the Top-k KL with one bucket for the tail
    (vOPD): it does not know y, so the mean stays as it is, and it takes most of the variance away.
    """
    in_head = torch.zeros_like(student.token_logprobs, dtype=torch.bool)  # not asked by `bucket`
    baseline = topk_kl(student, teacher, in_head, direction="reverse", tail="bucket")
    return baseline - token_log_ratio(student.token_logprobs, teacher.token_logprobs)

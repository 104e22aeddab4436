"""Computes token advantages: from a group of answers, a critic (GAE), or a KL to a teacher."""

from __future__ import annotations

import torch
from torch import Tensor

from student_trainer.losses.policy import token_log_ratio
from student_trainer.losses.rows import Rows
from student_trainer.losses.topk import topk_kl


def group_advantages(rewards: Tensor, *, scale_by_std: bool) -> Tensor:
    """Return the advantage (R - mean) / (std + 1e-6) of each answer within its group, [G, n].

    - rewards [G, n]: the rewards of n answers to each of G prompts; NaN if an answer has none. The
      mean and the std of a group ignore this answer, and its advantage is 0.
    - scale_by_std: False omits the division by the std, as in Dr. GRPO (arXiv 2503.20783).

    If all rewards of a group are equal, its advantages are 0. The std is the sample standard
    deviation (n - 1), as in implementations of GRPO (arXiv 2402.03300).
    """
    has_reward = rewards.isfinite()
    count = has_reward.sum(1, keepdim=True)
    zeros = torch.zeros_like(rewards)
    mean = torch.where(has_reward, rewards, zeros).sum(1, keepdim=True) / count.clamp(min=1)
    advantages = torch.where(has_reward, rewards - mean, zeros)
    if scale_by_std:
        std = (advantages.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        advantages = advantages / (std + 1e-6)
    # The mean of equal rewards can differ from the rewards by rounding; a division by such a small
    # std would amplify the difference.
    return torch.where(flat_groups(rewards)[:, None], zeros, advantages)


def flat_groups(rewards: Tensor) -> Tensor:
    """Return a mask [G] that is True for groups of `rewards` [G, n] whose rewards are all equal.

    The advantages of these groups are 0, so they have no policy gradient. NaN rewards are ignored.
    A group without any reward is also marked True.
    """
    has_reward = rewards.isfinite()
    highest = torch.where(has_reward, rewards, -torch.inf).amax(1)
    lowest = torch.where(has_reward, rewards, torch.inf).amin(1)
    return highest <= lowest


def reward_at_last_token(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Return the rewards of all tokens, [N]: the answer's reward at its last token, 0 elsewhere.

    - rewards [S]: the reward of each answer.
    - lengths [S]: the number of tokens of each answer, at least 1; N is their sum.
    """
    token_rewards = rewards.new_zeros(int(lengths.sum()))
    return token_rewards.index_put_((lengths.cumsum(0) - 1,), rewards)


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, sequence: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return GAE advantages [N] and the critic's targets [N] (arXiv 1506.02438, equation 16).

        delta_t = r_t + gamma V_(t+1) - V_t
        A_t = delta_t + gamma lam A_(t+1),  target_t = A_t + V_t

    - rewards [N]: the reward r of each token.
    - values [N]: the critic's value V before each token.
    - sequence [N]: the index of the answer of each token. The tokens of an answer are adjacent and
      in order.

    After the last token of an answer, V and A are 0. No gradient.
    """
    delta = rewards + gamma * _values_ahead(values, sequence, 1) - values
    # Doubling: each iteration doubles the number of deltas in an advantage, so log2(N) vector
    # operations replace a loop over N tokens.
    advantages, span = delta, 1
    while span < len(delta):
        advantages = advantages + (gamma * lam) ** span * _values_ahead(advantages, sequence, span)
        span *= 2
    return advantages, advantages + values


def _values_ahead(values: Tensor, sequence: Tensor, offset: int) -> Tensor:
    """Return for each token the value `offset` tokens later in its sequence, [N].

    The value is 0 after the end of the sequence.
    """
    shifted = torch.zeros_like(values)
    shifted[:-offset] = torch.where(sequence[:-offset] == sequence[offset:], values[offset:], 0)
    return shifted


@torch.no_grad()
def kl_reward(student: Rows, teacher: Rows, draw_logprobs: Tensor | None = None) -> Tensor:
    """Return an advantage per token: minus the sampled reverse KL, plus a baseline, [N] in nats.

        A = -(log p(y) - log q(y)) + baseline

    p and q are the distributions of the student and the teacher. The policy gradient with this
    advantage has the mean -grad KL(p||q) ("On-Policy Distillation", Thinking Machines).

    The baseline is an estimate of the KL that does not depend on y. It leaves the mean of the
    gradient unchanged and removes most of its variance. It is the Top-k KL with tail `bucket`
    (vOPD), or, if `draw_logprobs` [N, M] is given, the unbiased estimate with tail `bucket+draws`
    (see `topk_kl`). No gradient.
    """
    baseline = topk_kl(
        student,
        teacher,
        torch.zeros_like(student.token_logprobs, dtype=torch.bool),  # both modes ignore it
        direction="reverse",
        tail="bucket" if draw_logprobs is None else "bucket+draws",
        draw_logprobs=draw_logprobs,
    )
    return baseline - token_log_ratio(student.token_logprobs, teacher.token_logprobs)

"""Advantages compared with recursions, closed forms, and expectations over every token."""

import math

import pytest
import torch

from student_trainer.losses import (
    Direction,
    clipped_surrogate,
    exact_kl,
    flat_groups,
    gae,
    group_advantages,
    importance_weights,
    kl_reward,
    reward_at_last_token,
    rows_from_logits,
    token_log_ratio,
    topk_kl,
)
from tests.student_trainer.losses.enumeration import expectation, make_case, rows_for_every_token

EXACT = 1e-12
LENGTHS = torch.tensor([5, 1, 17, 2, 64])


def tokens(seed):
    """Return a random number for each token of five answers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(LENGTHS.sum()), generator=generator, dtype=torch.float64)


def parts():
    ends = LENGTHS.cumsum(0).tolist()
    return [slice(b - int(n), b) for b, n in zip(ends, LENGTHS, strict=True)]


SEQUENCE = torch.arange(len(LENGTHS)).repeat_interleave(LENGTHS)


@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0.0, 0.5)])
def test_gae_is_the_recursion(gamma, lam):
    rewards, values = tokens(0), tokens(1)
    expected = torch.zeros_like(rewards)
    for part in parts():
        ahead = value_ahead = 0.0
        for t in reversed(range(part.start, part.stop)):
            delta = rewards[t] + gamma * value_ahead - values[t]
            ahead = delta + gamma * lam * ahead
            value_ahead = values[t]
            expected[t] = ahead
    advantages, targets = gae(rewards, values, SEQUENCE, gamma=gamma, lam=lam)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=EXACT)
    torch.testing.assert_close(targets, expected + values, rtol=0, atol=EXACT)


def test_gae_at_its_ends():
    """lam = 1: rewards to come minus the value; lam = 0: one-step TD errors."""
    rewards, values = tokens(0), tokens(1)
    remaining, _ = gae(rewards, values, SEQUENCE, gamma=1.0, lam=1.0)
    step, _ = gae(rewards, values, SEQUENCE, gamma=0.9, lam=0.0)
    for part in parts():
        rewards_to_come = rewards[part].flip(0).cumsum(0).flip(0)
        torch.testing.assert_close(
            remaining[part], rewards_to_come - values[part], rtol=0, atol=EXACT
        )
        next_values = torch.cat([values[part][1:], values.new_zeros(1)])
        delta = rewards[part] + 0.9 * next_values - values[part]
        torch.testing.assert_close(step[part], delta, rtol=0, atol=EXACT)


def test_an_answer_is_rewarded_at_its_last_token():
    rewards = torch.tensor([1.0, -2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    of_tokens = reward_at_last_token(rewards, LENGTHS)
    for part, reward in zip(parts(), rewards, strict=True):
        assert of_tokens[part].tolist() == [0] * (part.stop - part.start - 1) + [reward]
    # Without a critic every token then has its answer's reward as its advantage.
    advantages, _ = gae(of_tokens, torch.zeros_like(of_tokens), SEQUENCE, gamma=1.0, lam=1.0)
    assert torch.equal(advantages, rewards[SEQUENCE])


@pytest.mark.parametrize("scale_by_std", [True, False])
def test_groups(scale_by_std):
    nan = math.nan
    rewards = torch.tensor(
        [
            [1, 0, 0, 0],
            [0.1, 0.1, 0.1, 0.1],
            [nan, 1, nan, 0],
            [nan, nan, nan, nan],
            [nan, 3, 3, 3],
        ],
        dtype=torch.float64,
    )
    advantages = group_advantages(rewards, scale_by_std=scale_by_std)
    scale = [0.5 + 1e-6, math.sqrt(0.5) + 1e-6] if scale_by_std else [1, 1]
    expected = torch.tensor(
        [
            [0.75 / scale[0]] + [-0.25 / scale[0]] * 3,
            [0] * 4,
            [0, 0.5 / scale[1], 0, -0.5 / scale[1]],
            [0] * 4,
            [0] * 4,
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(advantages, expected, rtol=0, atol=EXACT)
    flat = flat_groups(rewards)
    assert flat.tolist() == [False, True, False, True, True]
    assert not advantages[flat].any()  # exactly


def test_one_answer_alone_teaches_nothing():
    assert not group_advantages(torch.tensor([[3.0], [0.0]]), scale_by_std=True).any()


def gradients(losses, leaf):
    """The gradient of every token's loss, [V, V]."""
    cotangents = torch.eye(len(losses), dtype=losses.dtype)
    return torch.autograd.grad(losses, leaf, cotangents, is_grads_batched=True, retain_graph=True)[
        0
    ]


def spread(per_token, weights):
    """The variance of the gradient: E |g|^2 - |E g|^2."""
    mean = weights @ per_token
    return weights @ per_token.square().sum(1) - mean.square().sum()


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize(("vocab", "k"), [(60, 0), (60, 1), (60, 8), (60, 32), (20, 20)])
def test_kl_as_a_reward_has_the_gradient_of_the_kl_and_less_variance(vocab, k, on_policy):
    for seed in range(3):
        case = make_case(vocab, k, "reverse", on_policy=on_policy, seed=seed)
        student, teacher = (
            rows_for_every_token(logits, case.head) for logits in (case.student, case.teacher)
        )
        mu = case.behaviour.log_softmax(0)
        log_ratio = token_log_ratio(student.token_logprobs, mu)
        sampled_reward = -(student.token_logprobs - teacher.token_logprobs).detach()
        exact_value = exact_kl(case.student[None], case.teacher[None], direction="reverse").sum()
        (exact_gradient,) = torch.autograd.grad(exact_value, case.student)
        variances = []
        for advantages in (kl_reward(student, teacher), sampled_reward):
            losses = clipped_surrogate(log_ratio, advantages, clip_low=1.0, clip_high=math.inf)
            per_token = gradients(losses, case.student)
            assert (mu.exp() @ per_token - exact_gradient).abs().max() < EXACT
            variances.append(spread(per_token, mu.exp()))
        if k == 0:  # one bucket of all ids has a KL of zero, so there is no baseline
            assert variances[0] == variances[1]
        else:
            assert variances[0] < variances[1]


def test_draws_make_the_baseline_of_a_kl_reward_the_kl_itself():
    """The mean over every pair of a token y and a draw z is the exact gradient.

    The baseline's mean is the exact KL. With that mean (many draws), the variance is less than with
    the bucket's bound.
    """
    vocabulary = 24
    case = make_case(vocabulary, 4, "reverse", on_policy=True, seed=0)
    p = case.student.detach().softmax(0)
    tail = p.index_fill(0, case.head, 0)
    ids = torch.arange(vocabulary)
    pairs = torch.cartesian_prod(ids, ids[tail > 0])  # (y, z)
    chance = p[pairs[:, 0]] * (tail / tail.sum())[pairs[:, 1]]
    heads = case.head.expand(len(pairs), -1)
    leaf = case.student.detach().clone().requires_grad_()
    student, teacher = (
        rows_from_logits(logits.expand(len(pairs), -1), heads, pairs[:, 0], sample_ids=pairs[:, 1:])
        for logits in (leaf, case.teacher)
    )
    exact_value = exact_kl(leaf[None], case.teacher[None], direction="reverse").sum()
    (exact_gradient,) = torch.autograd.grad(exact_value, leaf)
    draw_logprobs = (tail / tail.sum()).log()[pairs[:, 1:]]
    spreads = []
    for draws in (draw_logprobs, None):
        advantages = kl_reward(student, teacher, draws)
        log_ratio = student.token_logprobs - student.token_logprobs.detach()
        losses = clipped_surrogate(log_ratio, advantages, clip_low=1.0, clip_high=math.inf)
        per_pair = gradients(losses, leaf)
        assert (chance @ per_pair - exact_gradient).abs().max() < EXACT
        weighted = (chance[:, None] * per_pair).view(vocabulary, -1, vocabulary)
        many_draws = weighted.sum(1) / p[:, None]
        spreads.append(spread(many_draws, p))
        if draws is not None:
            baseline = advantages + (student.token_logprobs - teacher.token_logprobs).detach()
            assert abs(chance @ baseline - exact_value.detach()) < EXACT
    assert spreads[0] < spreads[1]


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("tail", ["sampled", "bucket+sampled"])
def test_importance_weights_mend_another_policys_samples(direction: Direction, tail):
    case = make_case(200, 8, direction, on_policy=False)
    student, teacher = (
        rows_for_every_token(logits, case.head) for logits in (case.student, case.teacher)
    )
    mu = case.behaviour.log_softmax(0)
    in_head = torch.isin(torch.arange(200), case.head)
    exact_value = exact_kl(case.student[None], case.teacher[None], direction=direction).sum()
    (exact_gradient,) = torch.autograd.grad(exact_value, case.student)

    def bias(importance):
        values = topk_kl(
            student, teacher, in_head, direction=direction, tail=tail, importance=importance
        )
        value, gradient = expectation(values, mu.exp(), case.student)
        return abs(value - exact_value.detach()), (gradient - exact_gradient).abs().max()

    assert max(bias(importance_weights(student.token_logprobs, mu))) < EXACT
    assert min(bias(None)) > 1e-3  # without weights there is a bias
    bounded = importance_weights(student.token_logprobs, mu, clip=(0.8, 1.25))
    assert bounded.min() == 0.8
    assert bounded.max() == 1.25
    assert not bounded.requires_grad

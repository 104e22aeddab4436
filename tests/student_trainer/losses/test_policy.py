"""The policy gradient compared with explicit loops in float64, without autograd."""

import math

import pytest
import torch

from student_trainer.losses import (
    clipped_surrogate,
    fused_linear_loss,
    fused_linear_rows,
    group_advantages,
    is_clipped,
    rows_from_logits,
    sequence_log_ratio,
    sequence_weights,
    token_log_ratio,
    token_weights,
    topk_kl,
)

VOCAB, WIDTH = 11, 5
# Three groups of four answers. Weights are float32, in which halves are exact.
LENGTHS = torch.tensor([1, 4, 2, 8, 2, 2, 4, 1, 1, 1, 8, 4])
REWARDS = [[1.0, 0, 0, 0.25], [0.1, 0.1, 0.1, 0.1], [0, 1, 1, math.nan]]
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def problem():
    """Return hidden [N, H], weight [V, H], head ids, tokens, old log-probs [N] and sequence [N]."""
    n = int(LENGTHS.sum())
    hidden, weight = randn(n, WIDTH), randn(VOCAB, WIDTH, seed=1) / 2
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB, (n,), generator=generator)
    old_logprobs = (hidden @ weight.T).log_softmax(1).gather(1, tokens[:, None])[:, 0]
    sequence = torch.arange(len(LENGTHS)).repeat_interleave(LENGTHS)
    head = (hidden @ weight.T).topk(3).indices
    return hidden, weight, head, tokens, old_logprobs, sequence


def softmax(scores):
    highest = max(scores)
    masses = [math.exp(score - highest) for score in scores]
    return [mass / sum(masses) for mass in masses]


def advantages_by_hand(scale_by_std):
    advantages = []
    for group in REWARDS:
        known_rewards = [reward for reward in group if not math.isnan(reward)]
        mean = sum(known_rewards) / len(known_rewards)
        variance = sum((reward - mean) ** 2 for reward in known_rewards) / (len(known_rewards) - 1)
        scale = math.sqrt(variance) + 1e-6 if scale_by_std else 1
        is_flat = len(set(known_rewards)) == 1
        advantages += [
            0 if is_flat or math.isnan(reward) else (reward - mean) / scale for reward in group
        ]
    return advantages


def grpo_by_hand(hidden, weight, tokens, old_logprobs, advantages, is_included, aggregate):
    """Return loss, gradient in the weight, and tokens clipped above and below, of one update."""
    loss, above, below, start = 0.0, 0, 0, 0
    gradient = [[0.0] * WIDTH for _ in range(VOCAB)]
    lengths = LENGTHS.tolist()
    included_tokens = sum(
        length for length, included in zip(lengths, is_included, strict=True) if included
    )
    for length, advantage, included in zip(lengths, advantages, is_included, strict=True):
        share = 1 / included_tokens if aggregate == "token-mean" else 1 / sum(is_included) / length
        for t in range(start, start + length if included else start):
            scores = [sum(a * b for a, b in zip(row, hidden[t], strict=True)) for row in weight]
            p = softmax(scores)
            ratio = p[tokens[t]] / math.exp(old_logprobs[t])
            if advantage > 0 and ratio > 1.28:
                loss, above = loss - share * 1.28 * advantage, above + 1
                continue
            if advantage < 0 and ratio < 0.8:
                loss, below = loss - share * 0.8 * advantage, below + 1
                continue
            loss -= share * ratio * advantage
            for j in range(VOCAB):
                slope = -share * advantage * ratio * ((j == tokens[t]) - p[j])
                for i in range(WIDTH):
                    gradient[j][i] += slope * hidden[t][i]
        start += length
    return loss, torch.tensor(gradient, dtype=torch.float64), above, below


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale_by_std", [True, False])
@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-mean"])
def test_grpo_over_several_updates(aggregate, scale_by_std, masked):
    """The weights change, so that ratios leave the clip range on both sides."""
    hidden, weight, head, tokens, old_logprobs, _ = problem()
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    per_answer = group_advantages(rewards, scale_by_std=scale_by_std).flatten()
    expected = advantages_by_hand(scale_by_std)
    torch.testing.assert_close(per_answer, torch.tensor(expected, dtype=torch.float64))
    advantages = per_answer.repeat_interleave(LENGTHS)
    is_included = torch.ones(len(LENGTHS), dtype=torch.bool)
    if masked:
        is_included[[0, 3]] = False
    weights = token_weights(LENGTHS, is_included, aggregate)
    count = sequence_weights(LENGTHS, is_included, aggregate).sum()

    def loss_fn(rows, index):
        log_ratio = token_log_ratio(rows.token_logprobs, old_logprobs[index])
        return clipped_surrogate(log_ratio, advantages[index], **CLIPS) * weights[index]

    clipped_counts = [0, 0]
    for _ in range(6):
        leaf = weight.clone().requires_grad_()
        fused = fused_linear_loss(hidden, leaf, head, tokens, loss_fn, chunk_rows=7)
        loss = fused.loss_sum / count
        (gradient,) = torch.autograd.grad(loss, leaf)
        expected_loss, expected_gradient, above, below = grpo_by_hand(
            hidden.tolist(),
            weight.tolist(),
            tokens.tolist(),
            old_logprobs.tolist(),
            expected,
            is_included.tolist(),
            aggregate,
        )
        assert abs(loss.item() - expected_loss) < 1e-12
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-13)
        log_ratio = token_log_ratio(fused.rows.token_logprobs, old_logprobs)
        is_beyond = is_clipped(log_ratio, advantages, **CLIPS) & (weights > 0)
        assert int(is_beyond.sum()) == above + below
        clipped_counts = [clipped_counts[0] + above, clipped_counts[1] + below]
        weight = weight - (3 if scale_by_std else 8) * gradient
    assert min(clipped_counts) > 0


def test_what_tokens_count():
    lengths = torch.tensor([3, 7, 5, 0])
    is_included = torch.tensor([True, True, False, True])
    by_token = token_weights(lengths, is_included, "token-mean")
    assert by_token.tolist() == [1.0] * 10 + [0.0] * 5
    assert sequence_weights(lengths, is_included, "token-mean").tolist() == [3, 7, 0, 0]
    by_sequence = token_weights(lengths, is_included, "seq-mean-token-mean")
    torch.testing.assert_close(
        by_sequence, torch.tensor([1 / 3] * 3 + [1 / 7] * 7 + [0.0] * 5), rtol=1e-7, atol=0
    )
    assert sequence_weights(lengths, is_included, "seq-mean-token-mean").tolist() == [1, 1, 0, 0]


def gspo_by_autograd(logprobs, old_logprobs, advantages):
    """Return GSPO's loss; the ratio is differentiated as a geometric mean."""
    losses, start = [], 0
    for length, advantage in zip(LENGTHS.tolist(), advantages, strict=True):
        part = slice(start, start + length)
        ratio = (logprobs[part] - old_logprobs[part]).mean().exp()
        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage))
        start += length
    return torch.stack(losses).mean()


def test_sequence_ratio():
    hidden, weight, head, tokens, old_logprobs, sequence = problem()
    old_logprobs = old_logprobs + 0.3 * randn(len(old_logprobs), seed=3)
    rewards = torch.tensor([[1.0, 0, 0, 0.25], [0, 1, 0, 1], [0, 1, 1, 0]], dtype=torch.float64)
    advantages = group_advantages(rewards, scale_by_std=True).flatten()
    is_included = torch.ones(len(LENGTHS), dtype=torch.bool)
    weights = token_weights(LENGTHS, is_included, "seq-mean-token-mean")
    leaf = weight.clone().requires_grad_()
    rows, _ = fused_linear_rows(hidden, leaf, head, tokens, chunk_rows=5)
    log_ratio = sequence_log_ratio(rows.token_logprobs, old_logprobs, sequence)
    token_advantages = advantages.repeat_interleave(LENGTHS)
    loss = (clipped_surrogate(log_ratio, token_advantages, **CLIPS) * weights).sum() / len(LENGTHS)
    plain_logprobs = (hidden @ leaf.T).log_softmax(1).gather(1, tokens[:, None])[:, 0]
    expected = gspo_by_autograd(plain_logprobs, old_logprobs, advantages)
    is_beyond = is_clipped(log_ratio, token_advantages, **CLIPS)
    assert 0 < is_beyond.sum() < len(is_beyond)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, leaf)[0], torch.autograd.grad(expected, leaf)[0]
    )


def test_masked_tokens_have_no_gradient_at_all():
    """Exactly zero, also where the gradient would have been large."""
    hidden, weight, head, tokens, old_logprobs, _ = problem()
    hidden[0] *= 1e4
    hidden = hidden.float().requires_grad_()
    old_logprobs = old_logprobs.float()
    old_logprobs[1] -= 500
    is_included = torch.ones(len(LENGTHS), dtype=torch.bool)
    is_included[[0, 1, 3]] = False
    weights = token_weights(LENGTHS, is_included, "token-mean")
    teacher = rows_from_logits(1e3 * randn(len(old_logprobs), VOCAB, seed=4).float(), head, tokens)
    in_head = (head == tokens[:, None]).any(1)

    def loss_fn(rows, index):
        log_ratio = token_log_ratio(rows.token_logprobs, old_logprobs[index])
        surrogate = clipped_surrogate(log_ratio, -torch.ones_like(log_ratio), **CLIPS)
        kl = topk_kl(
            rows, teacher[index], in_head[index], direction="reverse", tail="bucket+sampled"
        )
        return (surrogate + kl) * weights[index]

    fused = fused_linear_loss(hidden, weight.float(), head, tokens, loss_fn)
    (gradient,) = torch.autograd.grad(fused.loss_sum, hidden)
    is_masked = weights == 0
    assert fused.loss_sum.isfinite()
    assert not gradient[is_masked].any()
    assert gradient[~is_masked].any(1).all()


@pytest.mark.parametrize("of_sequence", [False, True])
def test_one_batch_of_eight_is_eight_of_one(of_sequence):
    """Micro-batches hold whole answers, in any split; the sum of all is divided once."""
    hidden, weight, head, tokens, old_logprobs, sequence = problem()
    old_logprobs = old_logprobs + 0.3 * randn(len(old_logprobs), seed=3)
    advantages = randn(len(LENGTHS), seed=5).repeat_interleave(LENGTHS)
    is_included = torch.ones(len(LENGTHS), dtype=torch.bool)
    weights = token_weights(LENGTHS, is_included, "seq-mean-token-mean")

    def gradient(parts):
        leaf = weight.clone().requires_grad_()
        for part in parts:
            rows, _ = fused_linear_rows(hidden[part], leaf, head[part], tokens[part])
            log_ratio = token_log_ratio(rows.token_logprobs, old_logprobs[part])
            if of_sequence:
                number = sequence[part] - sequence[part][0]
                log_ratio = sequence_log_ratio(rows.token_logprobs, old_logprobs[part], number)
            losses = clipped_surrogate(log_ratio, advantages[part], **CLIPS)
            ((losses * weights[part]).sum() / len(LENGTHS)).backward()
        return leaf.grad

    ends = LENGTHS.cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    whole_gradient = gradient([slice(0, ends[-1])])
    single_gradient = gradient([slice(a, b) for a, b in zip(starts, ends, strict=True)])
    uneven_gradient = gradient(
        [slice(0, ends[2]), slice(ends[2], ends[7]), slice(ends[7], ends[-1])]
    )
    torch.testing.assert_close(single_gradient, whole_gradient, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(uneven_gradient, whole_gradient, rtol=1e-12, atol=1e-14)


def test_certain_and_impossible_tokens_stay_finite():
    """A student at log-prob -inf or 0, and a sampling policy at the opposite extreme."""
    student = torch.tensor([-torch.inf, 0.0, -80000.0, -1e-6], requires_grad=True)
    sampling = torch.tensor([-0.1, -torch.inf, 0.0, -70000.0])
    for advantage in (-1.0, 1.0):
        log_ratio = token_log_ratio(student, sampling)
        losses = clipped_surrogate(log_ratio, torch.full((4,), advantage), **CLIPS)
        (gradient,) = torch.autograd.grad(losses.sum(), student)
        assert losses.isfinite().all()
        assert gradient.isfinite().all()

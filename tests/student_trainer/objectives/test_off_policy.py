"""Losses on tokens of another policy, by exact sums over every token in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from clients.config.tables.rl_method import RLConfig
from student_trainer.data.batch import Batch
from student_trainer.losses import (
    Direction,
    FusedLoss,
    Rows,
    Tail,
    clipped_surrogate,
    exact_kl,
    importance_weights,
    is_clipped,
    mismatch,
    rows_from_logits,
)
from student_trainer.objectives.distillation import (
    DistillationObjective,
    batch_metrics,
    distillation_loss,
)
from student_trainer.objectives.rl import KLTerm, RLBatch, RLObjective
from tests.student_trainer.losses.enumeration import (
    Case,
    expectation,
    make_case,
    rows_for_every_token,
)

VOCAB, K = 50, 6
EXACT = 1e-12
DIRECTIONS: tuple[Direction, ...] = ("reverse", "forward")
ALL_ROWS = slice(0, VOCAB)


def batch_of(case: Case, **of_rl: Any) -> Any:
    """Return a batch with one row for every token that mu can sample."""
    nothing, tokens = torch.zeros(VOCAB, dtype=torch.long), torch.arange(VOCAB)
    kind = RLBatch if of_rl else Batch
    return kind(
        input_ids=nothing[:, None],
        position_ids=None,
        line=nothing,
        position=nothing,
        sequence=tokens,
        token_ids=tokens,
        head_ids=case.head.expand(VOCAB, -1),
        teacher=rows_for_every_token(case.teacher, case.head),
        sample_ids=None,
        draw_logprobs=None,
        sampling_logprobs=case.behaviour.log_softmax(0).detach(),
        teachers=(),
        **of_rl,
    )


def rl_batch(case: Case, advantages: Tensor, old_logprobs: Tensor | None = None) -> RLBatch:
    ones = torch.ones(VOCAB, dtype=torch.float64)
    batch = batch_of(
        case, other_rows=(), advantages=advantages, weights=ones, old_logprobs=old_logprobs
    )
    assert isinstance(batch, RLBatch)
    return batch


def as_if_on_policy(batch: Any, rows: Rows) -> Any:
    """Return the batch with the student as its sampler, so that every importance weight is 1."""
    return replace(batch, sampling_logprobs=rows.token_logprobs.detach())


def exact_gradient(case: Case, direction: Direction) -> tuple[Tensor, Tensor]:
    value = exact_kl(case.student[None], case.teacher[None], direction=direction).sum()
    return value.detach(), torch.autograd.grad(value, case.student)[0]


def bias(values: Tensor, case: Case, expected: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Return |E_mu[value] - expected| and the largest |E_mu[gradient] - expected|."""
    value, gradient = expectation(values, case.behaviour.softmax(0), case.student)
    return float(abs(value - expected[0])), float((gradient - expected[1]).abs().max())


@pytest.mark.parametrize("tail", ["bucket+sampled", "sampled"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_loss_of_distillation(direction: Direction, tail: Tail) -> None:
    case = make_case(VOCAB, K, direction, on_policy=False)
    objective = DistillationObjective(direction, tail, 1.0)
    batch, rows = batch_of(case), rows_for_every_token(case.student, case.head)
    expected = exact_gradient(case, direction)
    assert max(bias(distillation_loss(batch, objective)(rows, ALL_ROWS), case, expected)) < EXACT
    ignoring_loss = distillation_loss(as_if_on_policy(batch, rows), objective)
    assert min(bias(ignoring_loss(rows, ALL_ROWS), case, expected)) > 1e-3


@pytest.mark.parametrize("count", [1, 2])
def test_the_loss_of_distillation_with_draws_of_the_sampler(count: int) -> None:
    """On average over every outcome of M draws from the tail of mu, with their log-probs."""
    case = make_case(VOCAB, K, "reverse", on_policy=False)

    def tail_of(logits: Tensor) -> Tensor:
        return logits.detach().index_fill(0, case.head, -torch.inf).softmax(0)

    tail = tail_of(case.behaviour)
    (support,) = tail.nonzero(as_tuple=True)
    ids = torch.cartesian_prod(*[support] * count).reshape(-1, count)
    n = len(ids)
    nothing = torch.zeros(n, dtype=torch.long)
    rows, teacher = (
        rows_from_logits(row_logits.expand(n, -1), case.head.expand(n, -1), nothing, sample_ids=ids)
        for row_logits in (case.student, case.teacher)
    )
    batch = Batch(
        input_ids=nothing[:, None],
        position_ids=None,
        line=nothing,
        position=nothing,
        sequence=nothing,
        token_ids=nothing,
        head_ids=case.head.expand(n, -1),
        teacher=teacher,
        sample_ids=ids,
        draw_logprobs=tail.log()[ids],
        sampling_logprobs=case.behaviour.log_softmax(0).detach()[nothing],
        teachers=(),
    )
    ignoring_batch = replace(batch, draw_logprobs=tail_of(case.student).log()[ids])
    objective = DistillationObjective("reverse", "bucket+draws", 1.0)
    expected = exact_gradient(case, "reverse")
    biases = []
    for tested_batch in (batch, ignoring_batch):
        values = distillation_loss(tested_batch, objective)(rows, slice(0, n))
        value, gradient = expectation(values, tail[ids].prod(1), case.student)
        biases.append(
            (float(abs(value - expected[0])), float((gradient - expected[1]).abs().max()))
        )
    assert max(biases[0]) < EXACT
    assert min(biases[1]) > 1e-3


def mean_metric(case: Case, name: str, metrics_of: Any) -> float:
    """Return E_mu of a metric: its value for each token, times the token's probability."""
    mu = case.behaviour.softmax(0)
    return sum(float(mu[y]) * float(metrics_of(y)[name][0]) for y in range(VOCAB))


def batch_of_token(batch: Any, y: int) -> Any:
    """Return the batch of only the sampled token y."""
    values = {
        name: value[y : y + 1] if isinstance(value, Tensor | Rows) else value
        for name, value in vars(batch).items()
    }
    return type(batch)(**values)


def result_of_token(rows: Rows, y: int) -> FusedLoss:
    row = rows.detach()[y : y + 1]
    return FusedLoss(row.token_logprobs.sum(), row, {"entropy": row.token_logprobs})


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_metrics_of_distillation(direction: Direction) -> None:
    case = make_case(VOCAB, K, direction, on_policy=False)
    objective = DistillationObjective(direction, "bucket+sampled", 1.0)
    rows = rows_for_every_token(case.student, case.head)
    expected = float(exact_gradient(case, direction)[0])
    batch = batch_of(case)
    weighted, unweighted = (
        mean_metric(
            case,
            "kl/teacher",
            lambda y, tested_batch=tested_batch: batch_metrics(
                batch_of_token(tested_batch, y), result_of_token(rows, y), objective
            ),
        )
        for tested_batch in (batch, as_if_on_policy(batch, rows))
    )
    assert abs(weighted - expected) < EXACT
    assert abs(unweighted - expected) > 1e-3


def make_config(**changes: Any) -> RLConfig:
    return RLConfig(type="rl", **{"tail": "bucket+sampled", **changes})


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("top_k", [K, 0])
def test_the_kl_of_rl_with_one_update(direction: Direction, top_k: int) -> None:
    """Importance weights are used with updates_per_step = 1, too."""
    case = make_case(VOCAB, K, direction, on_policy=False)
    method = make_config(
        divergence=f"{direction}_kl", top_k=top_k, tail="bucket+sampled" if top_k else None
    )
    objective = RLObjective(method, (KLTerm("anchor", 1.0),), has_reward=False)
    rows = rows_for_every_token(case.student, case.head)
    batch = rl_batch(case, torch.zeros(VOCAB, dtype=torch.float64))
    expected = exact_gradient(case, direction)
    loss_bias = bias(objective.loss(batch)(rows, ALL_ROWS), case, expected)
    ignoring_loss = objective.loss(as_if_on_policy(batch, rows))
    # Only the gradients of k4 and k5 are those of the KL; their values estimate something else.
    relevant = max if top_k else (lambda pair: pair[1])
    assert relevant(loss_bias) < EXACT
    assert bias(ignoring_loss(rows, ALL_ROWS), case, expected)[1] > 1e-3
    if top_k:
        weighted, unweighted = (
            mean_metric(
                case,
                "kl/anchor",
                lambda y, tested_batch=tested_batch: objective.metrics(
                    batch_of_token(tested_batch, y), result_of_token(rows, y)
                ),
            )
            for tested_batch in (batch, as_if_on_policy(batch, rows))
        )
        assert abs(weighted - float(expected[0])) < EXACT
        assert abs(unweighted - float(expected[0])) > 1e-3


def policy_gradient(case: Case, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return -E_p[A] and its gradient."""
    value = -(case.student.softmax(0) * advantages).sum()
    return value.detach(), torch.autograd.grad(value, case.student)[0]


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_the_policy_gradient_of_the_first_update_is_exact(ratio: str) -> None:
    """The ratio to p_old is 1, so nothing is clipped, however far away the sampler is."""
    case = make_case(VOCAB, K, "reverse", on_policy=False)
    advantages = torch.randn(VOCAB, dtype=torch.float64)
    objective = RLObjective(make_config(ratio=ratio), (), has_reward=True)
    rows = rows_for_every_token(case.student, case.head)
    batch = rl_batch(case, advantages)
    expected = policy_gradient(case, advantages)
    assert max(bias(objective.loss(batch)(rows, ALL_ROWS), case, expected)) < EXACT
    assert objective.metrics(batch, whole_result(rows))["ratio/clipped"][0] == 0
    # With the sampler in place of p_old, tokens with a large ratio would be clipped.
    sampler_clipped = clipped_surrogate(
        rows.token_logprobs - batch.sampler_logprobs, advantages, clip_low=0.2, clip_high=0.28
    )
    assert bias(sampler_clipped, case, expected)[1] > 1e-3


def whole_result(rows: Rows) -> FusedLoss:
    rows = rows.detach()
    return FusedLoss(rows.token_logprobs.sum(), rows, {"entropy": rows.token_logprobs})


def test_a_later_update_is_weighed_by_both_ratios() -> None:
    """Inside the clips, p/p_old times p_old/mu is p/mu: the gradient of E_p[A]."""
    case = make_case(VOCAB, K, "reverse", on_policy=False)
    advantages = torch.randn(VOCAB, dtype=torch.float64)
    old_logits = case.student.detach() + 0.05 * torch.randn(VOCAB, dtype=torch.float64)
    batch = rl_batch(case, advantages, old_logits.log_softmax(0))
    rows = rows_for_every_token(case.student, case.head)
    expected = policy_gradient(case, advantages)
    objective = RLObjective(make_config(clip_low=1.0, clip_high=1e9), (), has_reward=True)
    assert max(bias(objective.loss(batch)(rows, ALL_ROWS), case, expected)) < EXACT


def test_bounded_weights_are_counted() -> None:
    case = make_case(VOCAB, K, "reverse", on_policy=False)
    rows = rows_for_every_token(case.student, case.head).detach()
    mu = case.behaviour.log_softmax(0).detach()
    weights = (rows.token_logprobs - mu).exp()
    batch = rl_batch(case, torch.ones(VOCAB, dtype=torch.float64))
    for name, bounds, is_bounded in (
        ("importance_clip", (0.0, 1.2), weights > 1.2),
        ("importance_mask", (0.7, 1.2), (weights > 1.2) | (weights < 0.7)),
    ):
        objective = RLObjective(make_config(**{name: bounds}), (), has_reward=True)
        total, count = objective.metrics(batch, whole_result(rows))["ratio/bounded"].tolist()
        assert (total, count) == (int(is_bounded.sum()), VOCAB)
        assert 0 < total < VOCAB


def test_truncated_and_masked_weights() -> None:
    """TIS and IcePop as their papers define them."""
    generator = torch.Generator().manual_seed(0)
    log_p, log_mu = torch.randn(2, 200, dtype=torch.float64, generator=generator).unbind()
    rho = [math.exp(p - m) for p, m in zip(log_p.tolist(), log_mu.tolist(), strict=True)]
    assert importance_weights(log_p, log_mu).tolist() == pytest.approx(rho)
    truncated = importance_weights(log_p, log_mu, clip=(0.0, 2.0))
    assert truncated.tolist() == pytest.approx([min(r, 2.0) for r in rho])
    masked = importance_weights(log_p, log_mu, mask=(0.5, 5.0))
    assert masked.tolist() == pytest.approx([r if 0.5 <= r <= 5 else 0.0 for r in rho])


def test_the_distance_from_the_sampler() -> None:
    case = make_case(VOCAB, K, "reverse", on_policy=False)
    p, mu = case.student.detach().softmax(0), case.behaviour.softmax(0)
    parts = [mismatch(p[y : y + 1].log(), mu[y : y + 1].log()) for y in range(VOCAB)]
    mean = {
        name: sum(chance * pair[name] for chance, pair in zip(mu, parts, strict=True))
        for name in parts[0]
    }
    of = {name: float(pair[0] / pair[1]) for name, pair in mean.items()}
    assert of["ratio/mean"] == pytest.approx(1, abs=EXACT)
    assert of["ratio/ess"] == pytest.approx(float(1 / (p * p / mu).sum()))
    assert of["ratio/kl"] == pytest.approx(float((mu * (mu / p).log()).sum()))


def test_dual_clip_by_hand() -> None:
    """max(min(r A, clip(r) A), c A) for A < 0 (arXiv 1912.09729, equation 5)."""
    ratios = [0.1, 0.79, 1.0, 1.5, 2.9, 3.1, 50.0]
    for advantage in (-2.0, 1.5):
        leaf = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
        advantages = torch.full_like(leaf, advantage)
        clips = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
        losses = clipped_surrogate(leaf, advantages, **clips)
        surrogates = [min(r * advantage, min(max(r, 0.8), 1.28) * advantage) for r in ratios]
        if advantage < 0:
            surrogates = [max(surrogate, 3.0 * advantage) for surrogate in surrogates]
        assert losses.tolist() == pytest.approx([-surrogate for surrogate in surrogates])
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        is_beyond = is_clipped(leaf, advantages, **clips)
        assert ((gradient == 0) == is_beyond).all()
        assert is_beyond.tolist() == [
            (r > 1.28 if advantage > 0 else r < 0.8 or r > 3.0) for r in ratios
        ]


def test_prefixes_of_another_policy_bias_whole_answers() -> None:
    """Weights of tokens leave a bias in the gradient of answers of two tokens; products do not."""
    generator = torch.Generator().manual_seed(3)

    def random_logits(spread: float) -> tuple[Tensor, Tensor]:
        shapes = (4,), (4, 4)  # of the first token, and of the second given the first
        first, second = (
            spread * torch.randn(shape, generator=generator, dtype=torch.float64)
            for shape in shapes
        )
        return first, second

    student = [logits.requires_grad_() for logits in random_logits(1.0)]
    shifts = random_logits(0.3)
    rewards = random_logits(1.0)[1]

    def token_logprobs(logits: Any) -> tuple[Tensor, Tensor]:
        """Return the log-probs of both tokens of every answer, [4, 4] each."""
        return logits[0].log_softmax(0)[:, None].expand(4, 4), logits[1].log_softmax(1)

    logprobs = token_logprobs(student)
    sampler_logprobs = token_logprobs(
        [p.detach() + d for p, d in zip(student, shifts, strict=True)]
    )
    answer_probs = sum(sampler_logprobs).exp()
    weights = [
        importance_weights(p.flatten(), mu.flatten()).reshape(4, 4)
        for p, mu in zip(logprobs, sampler_logprobs, strict=True)
    ]

    def gradient(loss: Tensor) -> Tensor:
        parts = torch.autograd.grad(loss, student, retain_graph=True)
        return torch.cat([part.flatten() for part in parts])

    exact = gradient((sum(logprobs).exp() * rewards).sum())
    of_tokens, of_products = (
        gradient(
            sum(
                (answer_probs * weight * rewards * p).sum()
                for weight, p in zip(token_weights, logprobs, strict=True)
            )
        )
        for token_weights in (weights, [weights[0] * weights[1]] * 2)
    )
    assert (of_products - exact).norm() < EXACT
    assert (of_tokens - exact).norm() > 0.05 * exact.norm()

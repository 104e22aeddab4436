"""The benchmark of tail draws: its closed forms against sums over every outcome, and its page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.draws.noise import (
    Estimator,
    draw_terms,
    exact_gradient,
    make_toy_positions,
    measure,
    measure_all,
)
from benchmarks.draws.page import write_draws_page
from student_trainer.losses import Direction, Tail, rows_from_logits, topk_kl
from student_trainer.rollouts.sample_step import draw_tail

VOCABULARY = 40
SAMPLED: list[tuple[Direction, Tail]] = [
    ("reverse", "published"),
    ("reverse", "sampled"),
    ("reverse", "bucket+sampled"),
    ("reverse", "bucket+draws"),
    ("forward", "published"),
    ("forward", "sampled"),
    ("forward", "bucket+sampled"),
    ("forward", "bucket+teacher_samples"),
]


@pytest.mark.parametrize(("direction", "tail"), SAMPLED)
@pytest.mark.parametrize("k", [1, 8])
def test_the_closed_forms_are_sums_over_every_outcome(
    direction: Direction, tail: Tail, k: int
) -> None:
    (position,) = make_toy_positions(VOCABULARY, 1)
    order = position.log_p if direction == "reverse" else position.log_q
    head = order.topk(k).indices
    drawer = position.log_q if tail == "bucket+teacher_samples" else position.log_p
    by_tail = tail in ("bucket+draws", "bucket+teacher_samples")
    chance = (drawer.index_fill(0, head, -torch.inf) if by_tail else drawer).softmax(0)
    leaf = position.log_p.repeat(VOCABULARY, 1).requires_grad_()
    all_ids = torch.arange(VOCABULARY)
    heads = head.expand(VOCABULARY, -1)
    rows, teacher_rows = (
        rows_from_logits(logprobs, heads, all_ids, sample_ids=all_ids[:, None])
        for logprobs in (leaf, position.log_q.expand(VOCABULARY, -1))
    )
    values = topk_kl(rows, teacher_rows, torch.isin(all_ids, head), direction=direction, tail=tail)
    (gradients,) = torch.autograd.grad(values.sum(), leaf)
    mean = chance @ gradients
    variance = chance @ (gradients - mean).square().sum(1)
    bias = (mean - exact_gradient(position, direction)).square().sum()
    estimator = Estimator(direction, tail, k, 1 if by_tail else 0, stratified=False)
    bias_and_variance = measure(position, estimator)
    assert bias_and_variance[0] == pytest.approx(float(bias), rel=1e-9, abs=1e-24)
    assert bias_and_variance[1] == pytest.approx(float(variance), rel=1e-9)


def test_stratified_draws_vary_less() -> None:
    (position,) = make_toy_positions(VOCABULARY, 1)
    spread = {
        (draws, stratified): measure(
            position, Estimator("reverse", "bucket+draws", 4, draws, stratified=stratified)
        )[1]
        for draws in (1, 16)
        for stratified in (True, False)
    }
    assert spread[1, True] == spread[1, False] == pytest.approx(16 * spread[16, False])
    assert spread[16, True] < spread[16, False]


@pytest.mark.parametrize("draws", [2, 5, 16])
def test_the_variance_of_stratified_draws_is_that_of_the_sampler(draws: int) -> None:
    """Against 20,001 values of the random number of a row, each drawn by the real sampler."""
    (position,) = make_toy_positions(VOCABULARY, 1)
    head = position.log_p.topk(4).indices
    levels = (torch.arange(20_001, dtype=torch.float64) + 0.5) / 20_001
    weights = position.log_p.exp().repeat(len(levels), 1)
    ids = draw_tail(weights, head.expand(len(levels), -1), levels, draws).ids.long()
    tail = torch.ones(VOCABULARY, dtype=torch.bool).index_fill_(0, head, False)
    estimator = Estimator("reverse", "bucket+draws", 4, draws)
    chance, factor, base = draw_terms(position, tail, estimator)
    vectors = torch.zeros(len(levels), VOCABULARY, dtype=torch.float64)
    vectors.scatter_add_(1, ids, factor[ids] / draws)
    vectors -= vectors.sum(1, keepdim=True) * base
    variance = (vectors - vectors.mean(0)).square().sum(1).mean()
    assert measure(position, estimator)[1] == pytest.approx(float(variance), rel=1e-3)
    assert chance.sum() == pytest.approx(1)


@pytest.mark.slow
def test_the_page_has_every_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.draws.page.TRAINING", tmp_path / "none.json")
    rows = measure_all(make_toy_positions(1000, 1))
    unbiased = [row["bias"] for row in rows if row["tail"] in ("bucket+draws", "bucket+sampled")]
    assert max(unbiased) < 1e-12
    page = tmp_path / "draws.md"
    write_draws_page({"vocabulary": 1000, "positions": 1, "pair": rows, "toy": rows}, page)
    text = page.read_text()
    assert text.count("| 16 | ") >= 3
    assert page.with_suffix(".png").stat().st_size > 10_000

"""Heads that are truncated, scaled or capped: the fused operator and autograd in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from student_trainer.losses import (
    LogitMap,
    Rows,
    entropy_from_logits,
    fused_linear_loss,
    fused_linear_rows,
    fused_linear_top_ids,
    rows_from_logits,
)
from student_trainer.losses.fused.logit_map import LogitCurve
from tests.student_trainer.losses.fused.test_linear_loss import (
    LOSSES,
    make_loss,
    problem,
    samples_of,
    sequence_loss,
)

MAPS = {
    "cut": LogitMap(40),
    "scaled": LogitMap(scale=0.125),
    "capped": LogitMap(cap=2.0),
    "cut, scaled and capped": LogitMap(40, scale=1.7, cap=3.0),
}
EVERY_MAP = pytest.mark.parametrize("logit_map", MAPS.values(), ids=MAPS)
N, K, WIDE = 24, 6, 53


def compute_logits(logit_map: LogitMap, products: Tensor) -> Tensor:
    """Return the logits of a map by their definition."""
    z = products[:, : logit_map.vocab_size] * logit_map.scale
    return z if logit_map.cap is None else logit_map.cap * torch.tanh(z / logit_map.cap)


def inputs(logit_map: LogitMap, dtype: torch.dtype) -> tuple[list[Tensor], Any]:
    """Return leaves whose padding ids have much mass, and ids and teacher rows of the real ids."""
    count = logit_map.vocab_size or WIDE
    hidden, _, _, head, tokens, teacher, weights = problem(N, count, K, dtype=dtype)
    _, weight, bias, *_ = problem(N, WIDE, K, seed=1, dtype=dtype)
    return [hidden, weight, bias], (head, tokens, teacher, weights)


@EVERY_MAP
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)], ids=["f32", "f64"]
)
def test_gradients_equal_autograd(
    logit_map: LogitMap, name: str, dtype: torch.dtype, tolerance: float
) -> None:
    leaves, (head, tokens, teacher, weights) = inputs(logit_map, dtype)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = compute_logits(logit_map, exact_leaves[0] @ exact_leaves[1].T + exact_leaves[2])
    samples = samples_of(head, logits.shape[1])
    rows = rows_from_logits(logits, head, tokens, sample_ids=samples, temperature=1.3)
    exact_loss_fn = make_loss(name, head, tokens, teacher.map(Tensor.double), weights.double())
    exact_loss = exact_loss_fn(rows, slice(0, N)).sum()
    expected = torch.autograd.grad(exact_loss, exact_leaves)

    fused = fused_linear_loss(
        leaves[0],
        leaves[1],
        head,
        tokens,
        make_loss(name, head, tokens, teacher, weights),
        sample_ids=samples,
        bias=leaves[2],
        temperature=1.3,
        logit_map=logit_map,
        chunk_rows=7,
    )
    gradients = torch.autograd.grad(fused.loss_sum, leaves)
    size = max(1.0, float(exact_loss.detach().abs()))
    assert abs(fused.loss_sum - exact_loss).detach() <= 10 * tolerance * size
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        assert gradient.shape == expected_gradient.shape
        assert (gradient - expected_gradient).norm() <= tolerance * max(
            float(expected_gradient.norm()), 1.0
        )
    for fused_values, exact_values in zip(
        fused.rows.__dict__.values(), rows.__dict__.values(), strict=True
    ):
        torch.testing.assert_close(
            fused_values.double(), exact_values.detach(), rtol=1e-5, atol=1e-5
        )
    entropy = entropy_from_logits(logits, temperature=1.3)
    torch.testing.assert_close(fused.metrics["entropy"].double(), entropy, rtol=1e-5, atol=1e-5)


@EVERY_MAP
def test_losses_of_all_rows_at_once(logit_map: LogitMap) -> None:
    leaves, (head, tokens, teacher, _) = inputs(logit_map, torch.float64)
    logits = compute_logits(logit_map, leaves[0] @ leaves[1].T + leaves[2])
    samples = samples_of(head, logits.shape[1])
    plain_rows = rows_from_logits(logits, head, tokens, sample_ids=samples)
    expected = torch.autograd.grad(sequence_loss(plain_rows, teacher.token_logprobs), leaves)
    rows, entropy = fused_linear_rows(
        leaves[0],
        leaves[1],
        head,
        tokens,
        sample_ids=samples,
        bias=leaves[2],
        logit_map=logit_map,
        chunk_rows=5,
    )
    gradients = torch.autograd.grad(sequence_loss(rows, teacher.token_logprobs), leaves)
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(entropy, entropy_from_logits(logits))


@EVERY_MAP
def test_the_likeliest_ids(logit_map: LogitMap) -> None:
    (hidden, weight, bias), _ = inputs(logit_map, torch.float64)
    top_ids = fused_linear_top_ids(hidden, weight, 5, bias=bias, logit_map=logit_map)
    logits = compute_logits(logit_map, hidden @ weight.T + bias)
    assert torch.equal(top_ids, logits.topk(5, 1).indices)


def test_ids_that_are_cut_off_get_no_gradient() -> None:
    leaves, (head, tokens, teacher, weights) = inputs(MAPS["cut"], torch.float32)
    loss_fn = make_loss("reverse/bucket", head, tokens, teacher, weights)
    fused = fused_linear_loss(
        *leaves[:2], head, tokens, loss_fn, bias=leaves[2], logit_map=MAPS["cut"]
    )
    _, of_weight, of_bias = torch.autograd.grad(fused.loss_sum, leaves)
    assert (of_weight[40:] == 0).all()
    assert (of_bias[40:] == 0).all()
    assert (of_weight[:40].abs().sum(1) > 0).all()


def test_a_cap_in_float32_keeps_its_slope_where_half_precision_loses_it() -> None:
    """At 0.999 c the slope is 0.002, but 0.999 rounds to 1 in bfloat16, where the slope is 0."""
    cap = 30.0
    products = cap * torch.atanh(torch.tensor([[0.999, 0.5, -0.999]]))
    curve = LogitMap(cap=cap).curve(1.0)
    slope = curve.slope(curve(products.float()))
    assert isinstance(slope, Tensor)
    torch.testing.assert_close(slope, torch.tensor([[0.001999, 0.75, 0.001999]]), rtol=1e-4, atol=0)
    assert float(1 - torch.tensor(0.999).bfloat16().square()) == 0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_scale_is_another_temperature(temperature: float) -> None:
    assert LogitMap(scale=0.25).curve(temperature) == LogitCurve(4 * temperature)
    assert LogitMap(scale=2.0, cap=30.0).curve(temperature) == LogitCurve(15.0, 30 / temperature)


def test_extreme_products_give_finite_rows() -> None:
    """A cap at its limit: every slope is 0, and no number is NaN."""
    weight = torch.randn(WIDE, 8, generator=torch.Generator().manual_seed(0)) * 1e4
    hidden = torch.randn(N, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    head = torch.arange(K).expand(N, -1)

    def loss_fn(rows: Rows, index: Any) -> Tensor:
        return rows.tail_logmass - rows.token_logprobs + rows.head_logprobs.sum(1)

    fused = fused_linear_loss(
        hidden, weight, head, torch.arange(N), loss_fn, logit_map=LogitMap(cap=15.0)
    )
    fused.loss_sum.backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    assert fused.metrics["entropy"].isfinite().all()

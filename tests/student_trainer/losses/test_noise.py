"""The noise of the draws, estimated from rows, compared with sums over every outcome."""

import pytest
import torch

from student_trainer.losses import exact_kl, rows_from_logits, topk_kl
from student_trainer.losses.topk import draw_noise


def make_logits(vocab, k, *, on_policy, seed=0):
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(vocab, generator=generator, dtype=torch.float64) * 1.5
    teacher = student + torch.randn(vocab, generator=generator, dtype=torch.float64)
    sampler = student
    if not on_policy:
        sampler = student + 0.3 * torch.randn(vocab, generator=generator, dtype=torch.float64)
    head = student.topk(k).indices
    g = sampler.index_fill(0, head, -torch.inf).log_softmax(0)
    return student, teacher, head, g


def estimate_kl(student, teacher, head, g, ids):
    """Return student rows, teacher rows and the estimated KL for draws `ids` [N, M]."""
    n = len(ids)
    rows, teacher_rows = (
        rows_from_logits(
            logits.expand(n, -1),
            head.expand(n, -1),
            torch.zeros(n, dtype=torch.long),
            sample_ids=ids,
        )
        for logits in (student, teacher)
    )
    is_in_head = torch.zeros(n, dtype=torch.bool)
    kl = topk_kl(
        rows,
        teacher_rows,
        is_in_head,
        direction="reverse",
        tail="bucket+draws",
        draw_logprobs=g[ids],
    )
    return rows, teacher_rows, kl


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("k", [1, 4, 9])
def test_its_mean_is_the_variance_of_independent_draws(k, on_policy):
    student, teacher, head, g = make_logits(10, k, on_policy=on_policy)
    tail = (g > -torch.inf).nonzero().flatten()
    pairs = torch.cartesian_prod(tail, tail)
    chance = g.exp()[pairs].prod(1)
    leaf = student.clone().requires_grad_()
    rows, teacher_rows, kl = estimate_kl(leaf, teacher, head, g, pairs)
    (gradients,) = torch.autograd.grad(
        kl, leaf, torch.eye(len(pairs), dtype=torch.float64), is_grads_batched=True
    )
    mean = chance @ gradients
    exact_variance = chance @ (gradients - mean).square().sum(1)
    # The sum of p^2 over the tail is estimated too; it is exact where all of the tail is known.
    variance, _ = draw_noise(rows.detach(), teacher_rows, pairs, g[pairs], kl.detach())
    assert float(chance @ variance) == pytest.approx(float(exact_variance), rel=0.02, abs=1e-12)


def test_the_size_is_the_squared_norm_of_the_exact_gradient():
    student, teacher, head, g = make_logits(200, 20, on_policy=True)
    levels = (torch.arange(64) + torch.rand(50, 1, generator=torch.Generator().manual_seed(0))) / 64
    ids = torch.searchsorted(g.exp().cumsum(0).expand(50, -1).contiguous(), levels.double())
    rows, teacher_rows, kl = estimate_kl(student, teacher, head, g, ids.clamp(max=199))
    leaf = student.clone().requires_grad_()
    exact_value = exact_kl(leaf[None], teacher[None], direction="reverse").sum()
    (gradient,) = torch.autograd.grad(exact_value, leaf)
    variance, size = draw_noise(rows, teacher_rows, ids, g[ids], kl)
    assert float(size.mean()) == pytest.approx(float(gradient.square().sum()), rel=0.01)
    assert (variance > 0).all()


def test_no_tail_no_noise():
    student, teacher, head, _ = make_logits(6, 6, on_policy=True)
    ids = torch.zeros(3, 4, dtype=torch.long)
    draw_logprobs = torch.full((3, 4), torch.inf, dtype=torch.float64)
    rows, teacher_rows = (
        rows_from_logits(
            logits.expand(3, -1),
            head.expand(3, -1),
            torch.zeros(3, dtype=torch.long),
            sample_ids=ids,
        )
        for logits in (student, teacher)
    )
    kl = exact_kl(student[None], teacher[None], direction="reverse").expand(3)
    variance, size = draw_noise(rows, teacher_rows, ids, draw_logprobs, kl)
    assert (variance == 0).all()
    leaf = student.clone().requires_grad_()
    exact_value = exact_kl(leaf[None], teacher[None], direction="reverse").sum()
    (gradient,) = torch.autograd.grad(exact_value, leaf)
    torch.testing.assert_close(size, gradient.square().sum().expand(3), rtol=1e-12, atol=0)

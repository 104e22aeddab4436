"""Gradients by finite differences, extreme logits, masked vocabulary, masked tokens."""

import math

import pytest
import torch

from student_trainer.losses import Rows, exact_kl, rows_from_logits, sampled_kl, topk_kl
from student_trainer.losses.rows import HIGHEST_LOG_RATIO

TAILS = ["none", "published", "sampled", "bucket", "bucket+sampled"]
DIRECTIONS = ["reverse", "forward"]


def problem(n=6, vocab=12, k=4, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(n, vocab, dtype=dtype, generator=generator) for _ in range(2))
    head = teacher.topk(k).indices
    tokens = torch.randint(vocab, (n,), generator=generator)
    return student.requires_grad_(), teacher, head, tokens


def is_in_head(head, tokens):
    return (head == tokens[:, None]).any(1)


@pytest.mark.parametrize("k", [0, 1, 4, 12])
def test_rows_gradcheck(k):
    student, _, head, tokens = problem(k=k)

    def rows(logits):
        out = rows_from_logits(logits, head, tokens, temperature=0.7)
        return out.head_logprobs, out.token_logprobs, *([out.tail_logmass] if k < 12 else [])

    assert torch.autograd.gradcheck(rows, (student,))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tail", ["none", "bucket"])
def test_gradcheck_of_the_deterministic_modes(tail, direction):
    student, teacher, head, tokens = problem()
    teacher_rows = rows_from_logits(teacher, head, tokens)

    def loss(logits):
        rows = rows_from_logits(logits, head, tokens)
        return topk_kl(rows, teacher_rows, is_in_head(head, tokens), direction=direction, tail=tail)

    assert torch.autograd.gradcheck(loss, (student,))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tail", ["published", "sampled", "bucket+sampled"])
def test_gradient_of_the_sampled_modes_is_the_formula(tail, direction):
    """Finite differences cannot see stop-gradients, so the logits' gradient is derived by hand."""
    student, teacher, head, tokens = problem()
    student_rows, teacher_rows = (
        rows_from_logits(student, head, tokens),
        rows_from_logits(teacher, head, tokens),
    )
    is_tail = ~is_in_head(head, tokens)
    loss = topk_kl(student_rows, teacher_rows, ~is_tail, direction=direction, tail=tail)
    (gradient,) = torch.autograd.grad(loss.sum(), student, retain_graph=True)

    def grad_of(values, weights):
        return torch.autograd.grad((values * weights.detach()).sum(), student, retain_graph=True)[0]

    log_w = teacher_rows.token_logprobs - student_rows.token_logprobs
    w = log_w.exp()
    base = topk_kl(
        student_rows,
        teacher_rows,
        ~is_tail,
        direction=direction,
        tail="bucket" if "bucket" in tail else "none",
    )
    expected = grad_of(base, torch.ones_like(base))
    within = student_rows.token_logprobs - student_rows.tail_logmass
    weight_of = {
        ("published", "reverse"): -log_w,
        ("sampled", "reverse"): 1 - log_w,
        ("published", "forward"): 1 - w,
        ("sampled", "forward"): -w,
        ("bucket+sampled", "reverse"): within
        - (teacher_rows.token_logprobs - teacher_rows.tail_logmass),
        ("bucket+sampled", "forward"): (teacher_rows.tail_logmass - student_rows.tail_logmass).exp()
        - w,
    }[tail, direction]
    inside_tail = tail == "bucket+sampled" and direction == "forward"
    expected = expected + grad_of(
        within if inside_tail else student_rows.token_logprobs, weight_of * is_tail
    )
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tail", TAILS)
def test_finite_at_huge_logits(tail, direction, dtype):
    student, teacher, head, tokens = problem(dtype=dtype)
    huge = (student.detach().sign() * 1e4).requires_grad_()
    for teacher_logits in (teacher, -huge.detach(), teacher.sign() * 1e4):
        student_rows, teacher_rows = (
            rows_from_logits(huge, head, tokens),
            rows_from_logits(teacher_logits, head, tokens),
        )
        loss = topk_kl(
            student_rows, teacher_rows, is_in_head(head, tokens), direction=direction, tail=tail
        )
        (gradient,) = torch.autograd.grad(loss.sum(), huge)
        assert loss.isfinite().all()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3++", "k4", "k5"])
def test_sampled_kinds_are_finite_at_huge_ratios(kind):
    student = torch.tensor([-2e4, 0.0, -torch.inf, -1.0], requires_grad=True)
    teacher = torch.tensor([0.0, -2e4, -1.0, -torch.inf])
    loss = sampled_kl(student, teacher, kind)
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("log_w", [0.01, 1.0, 20.0, 39.0, 99.0])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3++", "k4", "k5"])
def test_float32_gradients_at_extreme_ratios(kind: str, log_w: float) -> None:
    """Compared with the docstring's formulas; a ratio w beyond e^40 counts as e^40."""
    student = torch.tensor([-log_w - 1], requires_grad=True)
    teacher = torch.tensor([-1.0])
    (gradient,) = torch.autograd.grad(sampled_kl(student, teacher, kind).sum(), student)
    w = math.exp(min(log_w, 40.0))
    expected = {
        "k1": 1.0,
        "k2": -log_w,
        "k3": 1 - (w if log_w < 40 else 0.0),
        "k3++": -log_w,
        "k4": -log_w,
        "k5": 1 - w,
    }[kind]
    assert float(gradient) == pytest.approx(expected, rel=1e-5)


def test_the_norm_of_a_gradient_with_the_highest_ratio_is_finite() -> None:
    """The gradient of one token times a hidden state of 4,096 entries, squared in float32."""
    ratio = torch.tensor([HIGHEST_LOG_RATIO]).exp()
    assert (ratio * torch.ones(4096)).norm().isfinite()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tail", TAILS)
def test_masked_vocabulary_and_empty_tail_are_finite(tail, direction):
    student, teacher, head, tokens = problem()
    masked = teacher.clone()
    masked[:, head[0, 0]] = -torch.inf  # inside some heads, and for some rows the actual token
    masked[3, 1:] = -torch.inf  # a teacher with probability 1 for one id: its tail mass is zero
    for head_ids in (head, torch.arange(12).expand(6, 12)):
        s = rows_from_logits(student, head_ids, tokens)
        t = rows_from_logits(masked, head_ids, tokens)
        member = is_in_head(head_ids, tokens)
        loss = topk_kl(s, t, member, direction=direction, tail=tail)
        (gradient,) = torch.autograd.grad(loss.sum(), student)
        assert loss.isfinite().all()
        assert gradient.isfinite().all()


def test_a_masked_token_costs_what_the_documentation_says():
    """-inf counts as -65504 nats: p (log p + 65504)."""
    log_half = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    none = torch.tensor([-torch.inf], dtype=torch.float64)
    student = Rows(log_half, none, log_half[:, 0])
    teacher = Rows(torch.tensor([[0.0, -torch.inf]], dtype=torch.float64), none, none + 0)
    loss = topk_kl(student, teacher, torch.tensor([True]), direction="reverse", tail="bucket")
    expected = 0.5 * log_half[0, 0] + 0.5 * (log_half[0, 1] + 65504.0)
    torch.testing.assert_close(loss, expected[None])


def test_a_small_tail_mass_keeps_its_precision_in_float32():
    logits = torch.full((1, 1000), -30.0)
    logits[0, 0] = 10.0
    rows = rows_from_logits(logits, torch.tensor([[0]]), torch.tensor([5]))
    exact = torch.logsumexp(logits[:, 1:].double(), 1) - torch.logsumexp(logits.double(), 1)
    assert abs(rows.tail_logmass.double() - exact) < 1e-5
    naive = torch.log1p(-rows.head_logprobs.exp().sum(1))
    assert naive == -torch.inf, "1 - sum loses this tail"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tail", TAILS)
def test_masked_tokens_get_no_gradient(tail, direction):
    student, teacher, head, tokens = problem()
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    s, t = rows_from_logits(student, head, tokens), rows_from_logits(teacher, head, tokens)
    loss = topk_kl(s, t, is_in_head(head, tokens), direction=direction, tail=tail) * mask
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    assert (gradient[mask == 0] == 0).all()
    assert (gradient[mask == 1] != 0).any(1).all()


def test_no_gradient_reaches_the_teacher():
    student, teacher, head, tokens = problem()
    teacher.requires_grad_()
    s, t = rows_from_logits(student, head, tokens), rows_from_logits(teacher, head, tokens)
    loss = topk_kl(s, t, is_in_head(head, tokens), direction="forward", tail="bucket+sampled")
    exact = exact_kl(student, teacher, direction="forward")
    (loss + exact).sum().backward()
    assert teacher.grad is None

"""Every estimator compared with the exact KL, by enumeration in float64."""

from dataclasses import replace

import pytest
import torch

from student_trainer.losses import (
    Direction,
    Tail,
    exact_kl,
    rows_from_logits,
    sampled_kl,
    topk_kl,
)
from student_trainer.losses.sampled import Kind
from tests.documents import blocks
from tests.student_trainer.losses.enumeration import (
    Case,
    expectation,
    expected_topk_kl,
    make_case,
    rows_for_every_token,
)

EXACT = 1e-12
DIRECTIONS: list[Direction] = ["reverse", "forward"]
TAILS: list[Tail] = ["none", "published", "sampled", "bucket", "bucket+sampled"]
SIZES = [(200, 1), (200, 8), (200, 32), (200, 128), (20, 2)]


def exact_value_and_gradient(case: Case, direction: Direction, temperature: float = 1.0):
    value = exact_kl(
        case.student[None], case.teacher[None], direction=direction, temperature=temperature
    ).sum()
    (gradient,) = torch.autograd.grad(value, case.student)
    return value.detach(), gradient


def head_mass_gradient(case: Case):
    (gradient,) = torch.autograd.grad(case.student.softmax(0)[case.head].sum(), case.student)
    return gradient


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tail", ["sampled", "bucket+sampled"])
@pytest.mark.parametrize(("vocab", "k"), SIZES)
def test_value_and_gradient_are_unbiased(vocab, k, tail, direction, on_policy):
    case = make_case(vocab, k, direction, on_policy=on_policy)
    value, gradient = expected_topk_kl(case, direction, tail)
    true_value, true_gradient = exact_value_and_gradient(case, direction)
    assert abs(value - true_value) < EXACT
    assert (gradient - true_gradient).abs().max() < EXACT


@pytest.mark.parametrize("mean_only", [False, True])
@pytest.mark.parametrize(
    ("vocab", "k", "samples"),
    [(200, 1, 1), (200, 8, 1), (200, 128, 1), (200, 150, 2), (20, 2, 2), (20, 0, 1), (20, 0, 3)],
)
def test_teacher_samples_are_unbiased(vocab, k, samples, mean_only):
    """On average over every tuple of draws from the teacher's tail, without a student's token."""
    case = make_case(vocab, k, "forward", on_policy=True)
    tail = torch.ones(vocab, dtype=torch.bool).index_fill(0, case.head, False).nonzero()[:, 0]
    draw_ids = torch.cartesian_prod(*[tail] * samples).reshape(-1, samples)
    tail_logprobs = case.teacher[tail].log_softmax(0)
    probability = torch.zeros(vocab, dtype=torch.float64).index_copy(0, tail, tail_logprobs.exp())
    weights = probability[draw_ids].prod(1)
    ids = case.head.expand(len(draw_ids), -1)
    token = torch.zeros(len(draw_ids), dtype=torch.long)
    student, teacher = (
        rows_from_logits(logits.expand(len(draw_ids), -1), ids, token, sample_ids=draw_ids)
        for logits in (case.student, case.teacher)
    )
    if mean_only:  # stores have only the mean
        mean = teacher.sample_logprobs.mean(1, keepdim=True)
        teacher = replace(teacher, sample_logprobs=mean)
    values = topk_kl(
        student, teacher, token.bool(), direction="forward", tail="bucket+teacher_samples"
    )
    value, gradient = expectation(values, weights, case.student)
    true_value, true_gradient = exact_value_and_gradient(case, "forward")
    assert abs(value - true_value) < EXACT
    assert (gradient - true_gradient).abs().max() < EXACT


def test_teacher_samples_must_be_there():
    case = make_case(20, 4, "forward", on_policy=True)
    rows = rows_for_every_token(case.student, case.head)
    for direction in DIRECTIONS:
        with pytest.raises(ValueError, match="tail samples"):
            topk_kl(
                rows,
                rows,
                torch.zeros(20, dtype=torch.bool),
                direction=direction,
                tail="bucket+teacher_samples",
            )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_unbiased_at_a_temperature(direction, temperature):
    case = make_case(100, 8, direction, on_policy=True)
    value, gradient = expected_topk_kl(case, direction, "bucket+sampled", temperature=temperature)
    true_value, true_gradient = exact_value_and_gradient(case, direction, temperature)
    assert abs(value - true_value) < EXACT
    assert (gradient - true_gradient).abs().max() < EXACT


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize(("vocab", "k"), SIZES)
@pytest.mark.parametrize(("direction", "sign"), [("reverse", 1.0), ("forward", -1.0)])
def test_published_is_biased_by_the_gradient_of_the_head_mass(direction, sign, vocab, k, on_policy):
    case = make_case(vocab, k, direction, on_policy=on_policy)
    value, gradient = expected_topk_kl(case, direction, "published")
    true_value, true_gradient = exact_value_and_gradient(case, direction)
    bias = gradient - true_gradient
    assert abs(value - true_value) < EXACT
    assert (bias - sign * head_mass_gradient(case)).abs().max() < EXACT
    assert bias.abs().max() > 1e-3, "the case must have a tail for the bias to show"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("vocab", "k"), SIZES)
def test_bucket_is_the_exact_kl_of_the_coarse_outcomes(vocab, k, direction):
    case = make_case(vocab, k, direction, on_policy=True)
    value, gradient = expected_topk_kl(case, direction, "bucket")

    def coarse(logits):
        p = logits.softmax(0)
        tail = torch.ones(vocab, dtype=torch.bool).index_fill(0, case.head, False)
        return torch.cat([p[case.head], p[tail].sum()[None]])

    p, q = coarse(case.student), coarse(case.teacher)
    kl = (p * (p / q).log()).sum() if direction == "reverse" else (q * (q / p).log()).sum()
    (coarse_gradient,) = torch.autograd.grad(kl, case.student)
    assert abs(value - kl.detach()) < EXACT
    assert (gradient - coarse_gradient).abs().max() < EXACT
    assert 0 <= value < exact_value_and_gradient(case, direction)[0]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_none_is_the_truncated_sum_and_can_be_negative(direction):
    case = make_case(200, 8, direction, on_policy=True)
    value, _ = expected_topk_kl(case, direction, "none")
    p, q = case.student.softmax(0)[case.head], case.teacher.softmax(0)[case.head]
    truncated = (p * (p / q).log() if direction == "reverse" else q * (q / p).log()).sum()
    assert abs(value - truncated.detach()) < EXACT
    flat = Case(
        case.teacher.clone().requires_grad_(), case.student.detach(), case.behaviour, case.head
    )
    values = [
        expected_topk_kl(c, d, "none")[0]
        for c, d in ((case, "reverse"), (flat, "reverse"), (case, "forward"), (flat, "forward"))
    ]
    assert min(values) < 0


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tail", TAILS)
def test_a_head_of_everything_gives_the_exact_kl(tail, direction):
    case = make_case(50, 50, direction, on_policy=True)
    value, gradient = expected_topk_kl(case, direction, tail)
    true_value, true_gradient = exact_value_and_gradient(case, direction)
    assert abs(value - true_value) < EXACT
    assert (gradient - true_gradient).abs().max() < EXACT


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tail", ["sampled", "bucket", "bucket+sampled"])
def test_zero_at_equal_distributions(tail, direction):
    case = make_case(200, 8, direction, on_policy=True)
    equal_case = Case(case.student, case.student.detach(), case.behaviour, case.head)
    value, gradient = expected_topk_kl(equal_case, direction, tail)
    assert abs(value) < EXACT
    assert gradient.abs().max() < EXACT


KINDS: list[tuple[Kind, str | None, str | None]] = [
    ("k1", "reverse", None),
    ("k2", None, "reverse"),
    ("k3", "reverse", "forward"),
    ("k3++", "reverse", "reverse"),
    ("k4", "reverse", "reverse"),
    ("k5", "forward", "forward"),
]


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize(("kind", "value_of", "gradient_of"), KINDS)
def test_sampled_kinds_are_unbiased_for_what_the_table_says(kind, value_of, gradient_of, on_policy):
    case = make_case(200, 1, "reverse", on_policy=on_policy)
    student = rows_for_every_token(case.student, case.head).token_logprobs
    teacher = rows_for_every_token(case.teacher, case.head).token_logprobs
    mu = case.behaviour.softmax(0)
    importance = (student.exp() / mu).detach()
    value, gradient = expectation(importance * sampled_kl(student, teacher, kind), mu, case.student)
    for direction in DIRECTIONS:
        true_value, true_gradient = exact_value_and_gradient(case, direction)
        assert (abs(value - true_value) < EXACT) == (direction == value_of)
        assert ((gradient - true_gradient).abs().max() < EXACT) == (direction == gradient_of)
    if kind == "k1":
        assert gradient.abs().max() < EXACT


@pytest.mark.parametrize(
    ("tail", "direction", "kind"),
    [
        ("published", "reverse", "k4"),
        ("published", "forward", "k5"),
        ("bucket+sampled", "reverse", "k4"),
    ],
)
def test_an_empty_head_gives_the_sampled_estimator(tail, direction, kind):
    case = make_case(60, 0, direction, on_policy=True)
    student = rows_for_every_token(case.student, case.head).token_logprobs
    teacher = rows_for_every_token(case.teacher, case.head).token_logprobs
    mu = case.behaviour.softmax(0)
    expected = expectation(sampled_kl(student, teacher, kind), mu, case.student)
    estimate = expected_topk_kl(case, direction, tail)
    assert abs(estimate[0] - expected[0]) < EXACT
    assert (estimate[1] - expected[1]).abs().max() < EXACT


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_bucket_sampled_has_less_variance_than_sampled(direction):
    case = make_case(200, 8, direction, on_policy=True)
    mu = case.behaviour.softmax(0)

    def variance(tail: Tail) -> float:
        total = 0.0
        mean = expected_topk_kl(case, direction, tail)[1]
        for y in range(len(mu)):
            one_hot = torch.zeros_like(mu)
            one_hot[y] = 1.0
            student = rows_for_every_token(case.student, case.head)
            teacher = rows_for_every_token(case.teacher, case.head)
            values = topk_kl(
                student,
                teacher,
                torch.isin(torch.arange(len(mu)), case.head),
                direction=direction,
                tail=tail,
            )
            gradient = expectation(values, one_hot, case.student)[1]
            total += float(mu[y] * (gradient - mean).square().sum())
        return total

    assert variance("bucket+sampled") < variance("sampled")


def test_the_example_of_the_readme():
    """With a head of all ids, the loss is the exact KL, with its gradient."""
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 7, 32, dtype=torch.float64)
    student.requires_grad_()
    ids = torch.randint(32, (7,))
    (block,) = blocks("docs/methods.md", "losses")
    namespace = {"student_logits": student, "teacher_logits": teacher, "token_ids": ids}
    exec(block.body, namespace)
    p, q = student.log_softmax(1), teacher.log_softmax(1)
    expected = (p.exp() * (p - q)).sum(1).mean()
    assert abs(namespace["loss"] - expected) < 1e-6
    (gradient,) = torch.autograd.grad(namespace["loss"], student)
    (expected_gradient,) = torch.autograd.grad(expected, student)
    assert (gradient - expected_gradient).abs().max() < 1e-6

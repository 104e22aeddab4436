"""Tail mode `bucket+draws` equals the exact KL on average, over every outcome of the draws."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from student_trainer.losses import Direction, Rows, exact_kl, rows_from_logits, topk_kl
from student_trainer.rollouts.sample_step import draw_tail
from tests.student_trainer.losses.enumeration import Case, expectation, make_case

EXACT = 1e-12
DIRECTIONS: list[Direction] = ["reverse", "forward"]


def draws_kl(
    case: Case,
    direction: Direction,
    ids: Tensor,
    draw_logprobs: Tensor | None,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """Return the estimate [n] for draws `ids` [n, M], sampled with `draw_logprobs` [n, M]."""
    n = len(ids)
    token = torch.zeros(n, dtype=torch.long)
    student, teacher = (
        rows_from_logits(
            logits.expand(n, -1),
            case.head.expand(n, -1),
            token,
            sample_ids=ids.long(),
            temperature=temperature,
        )
        for logits in (case.student, case.teacher)
    )
    return topk_kl(
        student,
        teacher,
        token.bool(),
        direction=direction,
        tail="bucket+draws",
        draw_logprobs=draw_logprobs,
    )


def check_unbiased(
    case: Case,
    direction: Direction,
    weights: Tensor,
    ids: Tensor,
    draw_logprobs: Tensor | None,
    temperature: float = 1.0,
) -> None:
    """Check value and gradient on average; outcome i, draws ids[i], has probability weights[i]."""
    assert abs(weights.sum() - 1) < EXACT
    values = draws_kl(case, direction, ids, draw_logprobs, temperature=temperature)
    value, gradient = expectation(values, weights, case.student)
    exact_value = exact_kl(
        case.student[None], case.teacher[None], direction=direction, temperature=temperature
    ).sum()
    (exact_gradient,) = torch.autograd.grad(exact_value, case.student)
    assert abs(value - exact_value.detach()) < EXACT
    assert (gradient - exact_gradient).abs().max() < EXACT


def independent_draws(probabilities: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return every outcome of `count` independent draws: probabilities [n] and ids [n, M]."""
    (support,) = probabilities.nonzero(as_tuple=True)
    ids = torch.cartesian_prod(*[support] * count).reshape(-1, count)
    return probabilities[ids].prod(1), ids


def stratified_draws(policy: Tensor, head: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return every outcome of `draw_tail`: probabilities [n], ids and their log-probs [n, M].

    As a function of its uniform number the draws are constant between breakpoints, so the length
    of each piece is the probability of its draws.
    """
    tail = policy.index_fill(0, head, 0.0)
    ends = (tail.cumsum(0) / tail.sum().clamp(min=1e-300)).clamp(max=1)
    points = torch.cat([(ends * count).frac(), torch.tensor([0.0, 1.0])]).sort().values
    n = len(points) - 1
    tail_draws = draw_tail(
        policy.repeat(n, 1), head.expand(n, -1), (points[:-1] + points[1:]) / 2, count
    )
    return points.diff(), tail_draws.ids.long(), tail_draws.logprobs


def tail_of(case: Case, temperature: float = 1.0) -> Tensor:
    """Return the normalised tail of the policy mu, from which ids are drawn, [V]."""
    return (case.behaviour / temperature).index_fill(0, case.head, -torch.inf).softmax(0)


# Every head size of a small vocabulary, and 1, 2, 4 and 16 draws.
SIZES = [*[(12, k, 1) for k in range(12)], (200, 8, 1), (30, 8, 2), (9, 4, 4), (8, 6, 16)]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("vocab", "k", "count"), SIZES)
def test_draws_of_the_student_are_unbiased(vocab, k, count, direction):
    case = make_case(vocab, k, direction, on_policy=True)
    weights, ids = independent_draws(tail_of(case), count)
    check_unbiased(case, direction, weights, ids, None)
    check_unbiased(case, direction, weights, ids, tail_of(case).log()[ids])


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("vocab", "k", "count"), SIZES)
def test_draws_of_another_policy_are_unbiased(vocab, k, count, direction):
    case = make_case(vocab, k, direction, on_policy=False)
    weights, ids = independent_draws(tail_of(case), count)
    check_unbiased(case, direction, weights, ids, tail_of(case).log()[ids])


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("count", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("vocab", [12, 150])
def test_stratified_draws_are_unbiased(vocab, count, direction, on_policy):
    sizes = range(13) if vocab == 12 else (0, 8, 149, 150)
    for k in sizes:
        case = make_case(vocab, k, direction, on_policy=on_policy)
        weights, ids, draw_logprobs = stratified_draws(
            case.behaviour.softmax(0).detach(), case.head, count
        )
        check_unbiased(case, direction, weights, ids, draw_logprobs)
        if on_policy:
            check_unbiased(case, direction, weights, ids, None)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_unbiased_at_a_temperature(direction, temperature):
    case = make_case(100, 8, direction, on_policy=False)
    policy = (case.behaviour / temperature).softmax(0).detach()
    outcomes = stratified_draws(policy, case.head, 4)
    check_unbiased(case, direction, *outcomes, temperature)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("k", [0, 3, 11])
def test_draws_of_more_than_the_tail_are_unbiased(k, direction):
    """Ids drawn from the full distribution, before the head is known; those in it are ignored."""
    case = make_case(12, k, direction, on_policy=False)
    policy = case.behaviour.softmax(0).detach()
    outside = policy.log().index_fill(0, case.head, torch.inf)
    for weights, ids in (
        independent_draws(policy, 2),
        stratified_draws(policy, case.head[:0], 4)[:2],
    ):
        check_unbiased(case, direction, weights, ids, outside[ids])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_draws_and_ids_that_are_always_there_are_unbiased(direction):
    """The student draws outside its own top-k, which differs from the head, and adds its top-k ids.

    With K fixed ids and M draws, g is the expected count of an id divided by K + M.
    """
    case = make_case(14, 4, direction, on_policy=False)
    policy = case.behaviour.softmax(0).detach()
    own_ids = torch.tensor([0, 3, int(case.head[1]), 9])
    weights, drawn_ids, logprobs = stratified_draws(policy, own_ids, 3)
    ids = torch.cat([own_ids.expand(len(drawn_ids), -1), drawn_ids], 1)
    times = torch.cat([torch.ones(ids.shape[0], 4).double(), 3 * logprobs.exp()], 1)
    any_logprobs = (times / 7).log().masked_fill(torch.isin(ids, case.head), torch.inf)
    check_unbiased(case, direction, weights, ids, any_logprobs)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_ignored_draws_leave_the_bucket(direction):
    """With a head of all ids, a student without a tail, or placeholders of the sampler."""
    case = make_case(10, 4, direction, on_policy=True)
    bucket = {"direction": direction, "tail": "bucket"}
    full_head = Case(case.student, case.teacher, case.behaviour, torch.arange(10))
    certain = case.student.detach().clone()
    certain[[i for i in range(10) if i not in case.head]] = -torch.inf
    without_tail = Case(certain.requires_grad_(), case.teacher, certain.detach(), case.head)
    for tested_case, has_logprobs in (
        (full_head, False),
        (without_tail, False),
        (without_tail, True),
        (case, True),
    ):
        ids = torch.tensor([[0, 5, 9, 9]])
        draw_logprobs = torch.full((1, 4), torch.inf) if has_logprobs else None
        draws_loss = draws_kl(tested_case, direction, ids, draw_logprobs)
        student, teacher = (
            rows_from_logits(logits[None], tested_case.head[None], ids[:, 0])
            for logits in (tested_case.student, tested_case.teacher)
        )
        bucket_loss = topk_kl(student, teacher, torch.tensor([False]), **bucket)
        assert torch.equal(draws_loss, bucket_loss)
        gradients = [
            torch.autograd.grad(loss.sum(), tested_case.student, retain_graph=True)[0]
            for loss in (draws_loss, bucket_loss)
        ]
        assert gradients[0].isfinite().all()
        assert (gradients[0] - gradients[1]).abs().max() < EXACT


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_more_draws_vary_less_and_stratified_ones_least(direction):
    case = make_case(60, 4, direction, on_policy=True)
    policy = case.behaviour.softmax(0).detach()

    def variance(weights: Tensor, ids: Tensor) -> float:
        leaf = case.student.detach().repeat(len(ids), 1).requires_grad_()
        repeated_case = Case(leaf, case.teacher, case.behaviour, case.head)
        (gradients,) = torch.autograd.grad(
            draws_kl(repeated_case, direction, ids, None).sum(), leaf
        )
        mean = weights @ gradients
        return float(weights @ (gradients - mean).square().sum(1))

    single_variance = variance(*independent_draws(tail_of(case), 1))
    assert variance(*independent_draws(tail_of(case), 2)) == pytest.approx(single_variance / 2)
    for count in (4, 16, 64):
        assert variance(*stratified_draws(policy, case.head, count)[:2]) < single_variance / count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_finite_at_huge_logits_and_with_a_masked_vocabulary(direction, dtype):
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(6, 12, dtype=dtype, generator=generator) for _ in range(2))
    head = student.topk(4).indices
    huge = student.sign() * 1e4
    masked = teacher.clone()
    masked[:, [0, 5, 6]] = -torch.inf
    masked[3, 2:] = -torch.inf  # probability 1 at id 1, which is in no head
    ids = torch.randint(12, (6, 5), generator=generator)  # some of them head ids
    logprobs = torch.tensor([-1e-3, -30.0, -65504.0, -torch.inf, torch.inf], dtype=dtype)
    for student_logits in (student, huge, masked):
        for teacher_logits in (teacher, -huge, masked):
            for draw_logprobs in (None, logprobs.expand(6, -1)):
                leaf = student_logits.clone().requires_grad_()
                student_rows, teacher_rows = (
                    rows_from_logits(logits, head, ids[:, 0], sample_ids=ids)
                    for logits in (leaf, teacher_logits)
                )
                loss = topk_kl(
                    student_rows,
                    teacher_rows,
                    torch.zeros(6, dtype=torch.bool),
                    direction=direction,
                    tail="bucket+draws",
                    draw_logprobs=draw_logprobs,
                )
                (gradient,) = torch.autograd.grad(loss.sum(), leaf)
                assert loss.isfinite().all()
                assert gradient.isfinite().all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_masked_tokens_get_no_gradient(direction):
    case = make_case(12, 3, direction, on_policy=True)
    leaf = case.student.detach().repeat(4, 1).requires_grad_()
    ids = tail_of(case).multinomial(12, replacement=True).view(4, 3)
    mask = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    repeated_case = Case(leaf, case.teacher, case.behaviour, case.head)
    (gradient,) = torch.autograd.grad(
        (draws_kl(repeated_case, direction, ids, None) * mask).sum(), leaf
    )
    assert (gradient.any(1) == mask.bool()).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_draws_must_be_there(direction):
    def rows(samples: Tensor | None) -> Rows:
        return Rows(torch.zeros(2, 1), torch.zeros(2), torch.zeros(2), samples)

    draws = torch.zeros(2, 4)
    for student_draws, teacher_draws in (
        (None, draws),
        (draws, None),
        (draws, draws[:, :1]),
        (draws[:, :0],) * 2,
    ):
        with pytest.raises(ValueError, match="the log-prob of each draw"):
            topk_kl(
                rows(student_draws),
                rows(teacher_draws),
                torch.zeros(2, dtype=torch.bool),
                direction=direction,
                tail="bucket+draws",
            )

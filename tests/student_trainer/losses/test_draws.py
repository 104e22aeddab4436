"""Tail mode `bucket+draws` against the exact KL, by a sum over every outcome of the draws."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from student_trainer.losses import Direction, Rows, exact_kl, rows_from_logits, topk_kl
from student_trainer.rollouts.tail_draws import draw_tail
from tests.student_trainer.losses.enumeration import Case, expectation, make_case

EXACT = 1e-12
DIRECTIONS: list[Direction] = ["reverse", "forward"]


def draws_kl(
    case: Case,
    direction: Direction,
    ids: Tensor,
    drawn: Tensor | None,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """The estimate [n] for draws `ids` [n, M]; `drawn` [n, M]: log-probs of drawing them."""
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
        draw_logprobs=drawn,
    )


def check(
    case: Case,
    direction: Direction,
    weights: Tensor,
    ids: Tensor,
    drawn: Tensor | None,
    temperature: float = 1.0,
) -> None:
    """Outcome i, the draws ids[i], has the probability weights[i]."""
    assert abs(weights.sum() - 1) < EXACT
    values = draws_kl(case, direction, ids, drawn, temperature=temperature)
    value, gradient = expectation(values, weights, case.student)
    true = exact_kl(
        case.student[None], case.teacher[None], direction=direction, temperature=temperature
    ).sum()
    (true_gradient,) = torch.autograd.grad(true, case.student)
    assert abs(value - true.detach()) < EXACT
    assert (gradient - true_gradient).abs().max() < EXACT


def independent(probabilities: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Every outcome of `count` independent draws: its probability [n], the ids [n, M]."""
    (support,) = probabilities.nonzero(as_tuple=True)
    ids = torch.cartesian_prod(*[support] * count).reshape(-1, count)
    return probabilities[ids].prod(1), ids


def stratified(policy: Tensor, head: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every outcome of `draw_tail`: its probability [n], the ids and their log-probs [n, M].

    As a function of its uniform number the draws are constant between breakpoints, so the length
    of each piece is the probability of its draws.
    """
    tail = policy.index_fill(0, head, 0.0)
    ends = (tail.cumsum(0) / tail.sum().clamp(min=1e-300)).clamp(max=1)
    points = torch.cat([(ends * count).frac(), torch.tensor([0.0, 1.0])]).sort().values
    n = len(points) - 1
    drawn = draw_tail(
        policy.repeat(n, 1), head.expand(n, -1), (points[:-1] + points[1:]) / 2, count
    )
    return points.diff(), drawn.ids.long(), drawn.logprobs


def tail_of(case: Case, temperature: float = 1.0) -> Tensor:
    """The distribution from which the policy mu draws: its tail, normalised, [V]."""
    return (case.behaviour / temperature).index_fill(0, case.head, -torch.inf).softmax(0)


# Every head size of a small vocabulary; pairs, fours and sixteens of draws.
SIZES = [*[(12, k, 1) for k in range(12)], (200, 8, 1), (30, 8, 2), (9, 4, 4), (8, 6, 16)]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("vocab", "k", "count"), SIZES)
def test_draws_of_the_student_are_unbiased(vocab, k, count, direction):
    case = make_case(vocab, k, direction, on_policy=True)
    weights, ids = independent(tail_of(case), count)
    check(case, direction, weights, ids, None)
    check(case, direction, weights, ids, tail_of(case).log()[ids])


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("vocab", "k", "count"), SIZES)
def test_draws_of_another_policy_are_unbiased(vocab, k, count, direction):
    case = make_case(vocab, k, direction, on_policy=False)
    weights, ids = independent(tail_of(case), count)
    check(case, direction, weights, ids, tail_of(case).log()[ids])


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("count", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("vocab", [12, 150])
def test_stratified_draws_are_unbiased(vocab, count, direction, on_policy):
    sizes = range(13) if vocab == 12 else (0, 8, 149, 150)
    for k in sizes:
        case = make_case(vocab, k, direction, on_policy=on_policy)
        weights, ids, drawn = stratified(case.behaviour.softmax(0).detach(), case.head, count)
        check(case, direction, weights, ids, drawn)
        if on_policy:
            check(case, direction, weights, ids, None)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_unbiased_at_a_temperature(direction, temperature):
    case = make_case(100, 8, direction, on_policy=False)
    policy = (case.behaviour / temperature).softmax(0).detach()
    outcomes = stratified(policy, case.head, 4)
    check(case, direction, *outcomes, temperature)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("k", [0, 3, 11])
def test_draws_of_more_than_the_tail_are_unbiased(k, direction):
    """The head was not known when the ids were drawn, from everything: ids in it are ignored."""
    case = make_case(12, k, direction, on_policy=False)
    policy = case.behaviour.softmax(0).detach()
    outside = policy.log().index_fill(0, case.head, torch.inf)
    for weights, ids in (
        independent(policy, 2),
        stratified(policy, case.head[:0], 4)[:2],
    ):
        check(case, direction, weights, ids, outside[ids])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_draws_and_ids_that_are_always_there_are_unbiased(direction):
    """The student draws outside its own top-k, the head is another: its own top-k ids are added.

    With K ids that are always there and M draws, g is the expected number of times over K + M.
    """
    case = make_case(14, 4, direction, on_policy=False)
    policy = case.behaviour.softmax(0).detach()
    own = torch.tensor([0, 3, int(case.head[1]), 9])
    weights, drawn, logprobs = stratified(policy, own, 3)
    ids = torch.cat([own.expand(len(drawn), -1), drawn], 1)
    times = torch.cat([torch.ones(ids.shape[0], 4).double(), 3 * logprobs.exp()], 1)
    of_any = (times / 7).log().masked_fill(torch.isin(ids, case.head), torch.inf)
    check(case, direction, weights, ids, of_any)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_ignored_draws_leave_the_bucket(direction):
    """A head of everything, a student without a tail, placeholders of the sampler."""
    case = make_case(10, 4, direction, on_policy=True)
    bucket = {"direction": direction, "tail": "bucket"}
    everything = Case(case.student, case.teacher, case.behaviour, torch.arange(10))
    certain = case.student.detach().clone()
    certain[[i for i in range(10) if i not in case.head]] = -torch.inf
    without = Case(certain.requires_grad_(), case.teacher, certain.detach(), case.head)
    for one, given in ((everything, False), (without, False), (without, True), (case, True)):
        ids = torch.tensor([[0, 5, 9, 9]])
        drawn = torch.full((1, 4), torch.inf) if given else None
        found = draws_kl(one, direction, ids, drawn)
        student, teacher = (
            rows_from_logits(logits[None], one.head[None], ids[:, 0])
            for logits in (one.student, one.teacher)
        )
        wanted = topk_kl(student, teacher, torch.tensor([False]), **bucket)
        assert torch.equal(found, wanted)
        gradients = [
            torch.autograd.grad(loss.sum(), one.student, retain_graph=True)[0]
            for loss in (found, wanted)
        ]
        assert gradients[0].isfinite().all()
        assert (gradients[0] - gradients[1]).abs().max() < EXACT


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_more_draws_vary_less_and_stratified_ones_least(direction):
    case = make_case(60, 4, direction, on_policy=True)
    policy = case.behaviour.softmax(0).detach()

    def variance(weights: Tensor, ids: Tensor) -> float:
        leaf = case.student.detach().repeat(len(ids), 1).requires_grad_()
        one = Case(leaf, case.teacher, case.behaviour, case.head)
        (gradients,) = torch.autograd.grad(draws_kl(one, direction, ids, None).sum(), leaf)
        mean = weights @ gradients
        return float(weights @ (gradients - mean).square().sum(1))

    alone = variance(*independent(tail_of(case), 1))
    assert variance(*independent(tail_of(case), 2)) == pytest.approx(alone / 2)
    for count in (4, 16, 64):
        assert variance(*stratified(policy, case.head, count)[:2]) < alone / count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_finite_at_huge_logits_and_with_a_masked_vocabulary(direction, dtype):
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(6, 12, dtype=dtype, generator=generator) for _ in range(2))
    head = student.topk(4).indices
    huge = student.sign() * 1e4
    masked = teacher.clone()
    masked[:, [0, 5, 6]] = -torch.inf
    masked[3, 2:] = -torch.inf  # certain of id 1, which is in no head
    ids = torch.randint(12, (6, 5), generator=generator)  # some of them head ids
    logprobs = torch.tensor([-1e-3, -30.0, -65504.0, -torch.inf, torch.inf], dtype=dtype)
    for mine in (student, huge, masked):
        for other in (teacher, -huge, masked):
            for drawn in (None, logprobs.expand(6, -1)):
                leaf = mine.clone().requires_grad_()
                s, t = (
                    rows_from_logits(logits, head, ids[:, 0], sample_ids=ids)
                    for logits in (leaf, other)
                )
                loss = topk_kl(
                    s,
                    t,
                    torch.zeros(6, dtype=torch.bool),
                    direction=direction,
                    tail="bucket+draws",
                    draw_logprobs=drawn,
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
    one = Case(leaf, case.teacher, case.behaviour, case.head)
    (gradient,) = torch.autograd.grad((draws_kl(one, direction, ids, None) * mask).sum(), leaf)
    assert (gradient.any(1) == mask.bool()).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_draws_must_be_there(direction):
    def rows(samples: Tensor | None) -> Rows:
        return Rows(torch.zeros(2, 1), torch.zeros(2), torch.zeros(2), samples)

    some = torch.zeros(2, 4)
    for mine, other in ((None, some), (some, None), (some, some[:, :1]), (some[:, :0],) * 2):
        with pytest.raises(ValueError, match="the log-prob of each draw"):
            topk_kl(
                rows(mine),
                rows(other),
                torch.zeros(2, dtype=torch.bool),
                direction=direction,
                tail="bucket+draws",
            )

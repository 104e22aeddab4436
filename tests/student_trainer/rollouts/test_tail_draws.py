"""Draws of the tail: their distribution, by enumeration, and the sampler's records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from student_trainer.data.sequence import Rollout
from student_trainer.rollouts.rollouts import HuggingFaceRollouts
from student_trainer.rollouts.sample_step import draw_tail
from student_trainer.rollouts.sampler import Sampler, rollout_noise
from tests.student_trainer import tiny
from tests.student_trainer.model_teacher import completion_logprobs

NO_HEAD = torch.zeros(1, 0, dtype=torch.long)
PROMPTS = [tiny.prompt(*ids) for ids in [(1, 2), (3, 4, 5, 6, 7), (8,), (9, 10, 11), (12,)]]
M = 6


def expected_counts(weights: Tensor, head: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, least and most draws of each id over the uniform number, [V] each."""
    tail = weights.index_fill(0, head, 0.0)
    ends = (tail.cumsum(0) / tail.sum()).clamp(max=1)
    points = torch.cat([(ends * count).frac(), torch.tensor([0.0, 1.0])]).sort().values
    is_piece = points.diff() > 1e-13  # drop pieces that are rounding errors
    points, widths = points[:-1][is_piece] + points.diff()[is_piece] / 2, points.diff()[is_piece]
    tail_draws = draw_tail(
        weights.repeat(len(points), 1), head.expand(len(points), -1), points, count
    )
    tail_logprobs = (tail / tail.sum()).log()
    torch.testing.assert_close(
        tail_draws.logprobs, tail_logprobs[tail_draws.ids.long()], rtol=0, atol=1e-12
    )
    assert (tail_draws.ids.diff(dim=1) >= 0).all()
    counts = torch.zeros(len(points), len(weights), dtype=torch.float64)
    counts.scatter_add_(
        1, tail_draws.ids.long(), torch.ones(tail_draws.ids.shape, dtype=torch.float64)
    )
    return widths @ counts, counts.amin(0), counts.amax(0)


@pytest.mark.parametrize("count", [1, 4, 16, 64])
# Less than a group of 64 ids, one group, one plus a remainder, and several.
@pytest.mark.parametrize("vocab", [1, 5, 64, 65, 200, 1025, 1100])
def test_every_id_is_drawn_in_proportion_to_its_weight(vocab: int, count: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    weights = (4 * torch.randn(vocab, dtype=torch.float64, generator=generator)).exp()
    weights[weights < 0.05] = 0.0  # impossible ids
    if vocab == 1:
        weights[0] = 0.3
    for k in {0, min(3, vocab - 1)}:
        head = weights.topk(k).indices
        mean_counts, min_counts, max_counts = expected_counts(weights, head, count)
        expected = weights.index_fill(0, head, 0.0)
        expected = expected / expected.sum() * count
        assert (mean_counts - expected).abs().max() < 1e-11
        assert (max_counts <= expected.ceil() + (expected > 0)).all()
        assert (min_counts >= expected.floor() - 1).all()
        assert not mean_counts[head].any()
        assert not mean_counts[weights == 0].any()


def make_large_tail(vocab: int = 151_936) -> tuple[Tensor, Tensor]:
    """Return weights of 64 likely ids and a tail of mass 1e-9 over 13 orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    weights = (5 * torch.randn(1, vocab, dtype=torch.float64, generator=generator)).exp()
    head = weights.topk(64, dim=1).indices
    return weights.scatter(1, head, 1e9 * float(weights.sum())), head


def test_a_large_vocabulary_by_counts() -> None:
    """The count of each id in 100,000 stratified draws is exact to within one draw."""
    weights, head = make_large_tail()
    expected = weights.scatter(1, head, 0)[0]
    expected = expected / expected.sum() * 100_000
    tail_draws = draw_tail(weights, head, torch.tensor([0.37], dtype=torch.float64), 100_000)
    counts = tail_draws.ids[0].long().bincount(minlength=weights.shape[1])
    assert ((counts - expected).abs() < 1 + 1e-6).all()


def test_a_large_vocabulary_by_chi_square() -> None:
    """One draw for each of 2,000 uniform numbers, counted in 40 ranges of ids."""
    weights, head = make_large_tail()
    tail = weights.scatter(1, head, 0)[0]
    uniforms = rollout_noise(5, 3, 2000, draws=True)
    sampled_ids = torch.cat(
        [
            draw_tail(weights.repeat(len(part), 1), head.expand(len(part), -1), part, 1).ids
            for part in uniforms.split(20)
        ]
    )
    bins = (torch.arange(len(tail)) * 40 // len(tail)).long()
    expected = torch.zeros(40, dtype=torch.float64).index_add(0, bins, tail / tail.sum()) * 2000
    bin_counts = bins[sampled_ids[:, 0].long()].bincount(minlength=40)
    assert float(((bin_counts - expected) ** 2 / expected).sum()) < limit_of_chi_square(39)


def limit_of_chi_square(freedom: int) -> float:
    """Wilson and Hilferty: the cube root is close to normal; 4 standard deviations."""
    return float(freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_the_ends_of_the_levels(uniform: float) -> None:
    weights = torch.tensor([[0.0, 0.0, 0.5, 0.0, 0.2, 0.3, 0.0]], dtype=torch.float64)
    for count in (1, 3, 64):
        tail_draws = draw_tail(weights.clone(), NO_HEAD, torch.tensor([uniform]).double(), count)
        assert set(tail_draws.ids.flatten().tolist()) <= {2, 4, 5}
        assert tail_draws.logprobs.isfinite().all()


def test_a_row_without_a_tail_has_placeholders() -> None:
    weights = torch.rand(3, 80, dtype=torch.float64)
    weights[1, 2:] = 0.0
    head = torch.tensor([[0, 1]] * 3)
    tail_draws = draw_tail(weights, head, torch.full((3,), 0.9, dtype=torch.float64), 4)
    assert tail_draws.ids.dtype == torch.int32
    assert tail_draws.ids[1].tolist() == [0] * 4
    assert (tail_draws.logprobs[1] == torch.inf).all()
    assert tail_draws.logprobs[[0, 2]].isfinite().all()
    full_head = torch.arange(80).expand(3, -1)
    assert (draw_tail(weights, full_head, torch.zeros(3).double(), 4).logprobs == torch.inf).all()


def generate_rollouts(
    model: Any,
    numbers: Sequence[int],
    *,
    draws: int = M,
    top_k: int = 5,
    new: int = 8,
    **options: Any,
) -> list[Rollout]:
    rollouts = HuggingFaceRollouts(
        Sampler(
            model,
            tiny.tokenizer(),
            top_k=top_k,
            temperature=options.pop("temperature", 1.0),
            draws=draws,
        ),
        max_new_tokens=new,
        batch_tokens=options.pop("batch", 10_000),
    )
    prompts = options.pop("prompts", PROMPTS)
    batches = rollouts.generate(prompts, numbers, **{"seed": 3, **options})
    return [rollout for batch in batches for rollout in batch]


def drawn_ids(rollout: Rollout) -> list[list[int]]:
    assert rollout.draws is not None
    return rollout.draws.ids.tolist()


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_draws_are_those_of_a_whole_forward_pass(
    student: Any, temperature: float, top_k: int
) -> None:
    """Draws are of the tail of softmax(logits / temperature), the distribution of the loss."""
    rollouts = generate_rollouts(student, range(5), temperature=temperature, top_k=top_k)
    for number, rollout in enumerate(rollouts):
        exact_logprobs = completion_logprobs(student, rollout, temperature)
        levels = rollout_noise(number, 3, len(exact_logprobs), draws=True)
        expected_draws = draw_tail(exact_logprobs.exp(), rollout.head_ids.long(), levels, M)
        assert rollout.draws is not None
        assert torch.equal(rollout.draws.ids, expected_draws.ids)
        torch.testing.assert_close(
            rollout.draws.logprobs, expected_draws.logprobs.float(), rtol=0, atol=1e-4
        )
        is_in_head = rollout.draws.ids[:, :, None] == rollout.head_ids[:, None, :]
        assert not is_in_head.any()


def test_tokens_are_the_same_with_and_without_draws(student: Any) -> None:
    generator = torch.Generator().manual_seed(3 * 1_000_000_007 + 7)
    assert torch.equal(
        rollout_noise(7, 3, 5), torch.rand(5, generator=generator, dtype=torch.float64)
    )
    for rollout, without_draws in zip(
        generate_rollouts(student, range(5)),
        generate_rollouts(student, range(5), draws=0),
        strict=True,
    ):
        assert torch.equal(rollout.token_ids, without_draws.token_ids)
        assert torch.equal(rollout.head_ids, without_draws.head_ids)
        assert torch.equal(rollout.token_logprobs, without_draws.token_logprobs)
        assert without_draws.draws is None


def test_draws_depend_on_the_number_and_the_seed_alone(student: Any) -> None:
    numbers = [7, 2, 11, 5, 30]
    rollouts = generate_rollouts(student, numbers)
    for variant in (
        [
            generate_rollouts(student, [n], prompts=[p])[0]
            for p, n in zip(PROMPTS, numbers, strict=True)
        ],
        generate_rollouts(student, numbers, batch=30),
        generate_rollouts(student, numbers[::-1], prompts=PROMPTS[::-1])[::-1],
    ):
        assert list(map(drawn_ids, rollouts)) == list(map(drawn_ids, variant))
    for rollout, longer_rollout in zip(
        rollouts, generate_rollouts(student, numbers, new=12), strict=True
    ):
        assert drawn_ids(longer_rollout)[: len(rollout.completion)] == drawn_ids(rollout)
    same_prompt = generate_rollouts(student, range(4), prompts=[PROMPTS[0]] * 4)
    assert len({str(drawn_ids(rollout)[0]) for rollout in same_prompt}) > 1
    other_seed = generate_rollouts(student, range(4), prompts=[PROMPTS[0]] * 4, seed=4)
    assert [drawn_ids(rollout)[0] for rollout in same_prompt] != [
        drawn_ids(rollout)[0] for rollout in other_seed
    ]


def test_the_numbers_of_draws_are_of_another_stream() -> None:
    own, draws = rollout_noise(3, 1, 4000), rollout_noise(3, 1, 4000, draws=True)
    correlation = torch.corrcoef(torch.stack([own, draws]))[0, 1]
    assert abs(correlation) < 4 / math.sqrt(4000)
    assert abs(draws.mean() - 0.5) < 4 / math.sqrt(12 * 4000)
    assert torch.equal(draws[:10], rollout_noise(3, 1, 10, draws=True))
    rollout_noise(-1, 2**31, 1, draws=True)  # any seed and number of the tokens' stream


def test_top_p_and_ends_leave_the_draws_alone(student: Any) -> None:
    """Draws are of the policy before top-p, and only for tokens of the answer."""
    prompt_ids = [torch.from_numpy(prompt.ids).long() for prompt in PROMPTS]
    noise = [rollout_noise(n, 3, 20) for n in range(5)]
    levels = [rollout_noise(n, 3, 20, draws=True) for n in range(5)]
    first_draws = []
    for top_p in (1.0, 0.5):
        sampler = Sampler(student, tiny.tokenizer(), top_k=2, temperature=1.0, top_p=top_p, draws=M)
        sequences = sampler.write(prompt_ids, [20, 3, 20, 20, 1], noise, draw_noise=levels)
        for sequence in sequences:
            assert sequence.draws is not None
            assert (
                sequence.draws.ids.shape
                == sequence.draws.logprobs.shape
                == (len(sequence.token_ids), M)
            )
        first_draws.append(
            [sequence.draws.ids[0].tolist() for sequence in sequences if sequence.draws is not None]
        )
    assert first_draws[0] == first_draws[1]


def test_greedy_rollouts_have_no_draws(student: Any) -> None:
    assert all(
        rollout.draws is None for rollout in generate_rollouts(student, range(5), greedy=True)
    )

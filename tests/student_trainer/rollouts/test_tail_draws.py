"""Draws of the tail: their distribution by enumeration, and what the sampler records of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from student_trainer.data.rollout import Rollout
from student_trainer.rollouts.hf import HuggingFaceRollouts
from student_trainer.rollouts.sampler import Sampler, rollout_noise
from student_trainer.rollouts.tail_draws import draw_tail
from tests.student_trainer import tiny
from tests.student_trainer.model_teacher import completion_logprobs

NO_HEAD = torch.zeros(1, 0, dtype=torch.long)
PROMPTS = [tiny.prompt(*ids) for ids in [(1, 2), (3, 4, 5, 6, 7), (8,), (9, 10, 11), (12,)]]
M = 6


def expected_counts(weights: Tensor, head: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Integrate over the uniform number: mean, least and most draws of each id, [V] each."""
    tail = weights.index_fill(0, head, 0.0)
    ends = (tail.cumsum(0) / tail.sum()).clamp(max=1)
    points = torch.cat([(ends * count).frac(), torch.tensor([0.0, 1.0])]).sort().values
    kept = points.diff() > 1e-13  # pieces that rounding made
    points, widths = points[:-1][kept] + points.diff()[kept] / 2, points.diff()[kept]
    drawn = draw_tail(weights.repeat(len(points), 1), head.expand(len(points), -1), points, count)
    within = (tail / tail.sum()).log()
    torch.testing.assert_close(drawn.logprobs, within[drawn.ids.long()], rtol=0, atol=1e-12)
    assert (drawn.ids.diff(dim=1) >= 0).all()
    counts = torch.zeros(len(points), len(weights), dtype=torch.float64)
    counts.scatter_add_(1, drawn.ids.long(), torch.ones(drawn.ids.shape, dtype=torch.float64))
    return widths @ counts, counts.amin(0), counts.amax(0)


@pytest.mark.parametrize("count", [1, 4, 16, 64])
# Less than a group of 64 ids, one, one and a bit, several.
@pytest.mark.parametrize("vocab", [1, 5, 64, 65, 200, 1025, 1100])
def test_every_id_is_drawn_in_proportion_to_its_weight(vocab: int, count: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    weights = (4 * torch.randn(vocab, dtype=torch.float64, generator=generator)).exp()
    weights[weights < 0.05] = 0.0  # impossible ids
    if vocab == 1:
        weights[0] = 0.3
    for k in {0, min(3, vocab - 1)}:
        head = weights.topk(k).indices
        mean, least, most = expected_counts(weights, head, count)
        wanted = weights.index_fill(0, head, 0.0)
        wanted = wanted / wanted.sum() * count
        assert (mean - wanted).abs().max() < 1e-11
        assert (most <= wanted.ceil() + (wanted > 0)).all()
        assert (least >= wanted.floor() - 1).all()
        assert not mean[head].any()
        assert not mean[weights == 0].any()


def large(vocab: int = 151_936) -> tuple[Tensor, Tensor]:
    """A tail of mass 1e-9: after 64 likely ids, probabilities over 13 orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    weights = (5 * torch.randn(1, vocab, dtype=torch.float64, generator=generator)).exp()
    head = weights.topk(64, dim=1).indices
    return weights.scatter(1, head, 1e9 * float(weights.sum())), head


def test_a_large_vocabulary_by_counts() -> None:
    """Of 100,000 stratified draws, each id has its share to within one draw."""
    weights, head = large()
    wanted = weights.scatter(1, head, 0)[0]
    wanted = wanted / wanted.sum() * 100_000
    drawn = draw_tail(weights, head, torch.tensor([0.37], dtype=torch.float64), 100_000)
    counts = drawn.ids[0].long().bincount(minlength=weights.shape[1])
    assert ((counts - wanted).abs() < 1 + 1e-6).all()


def test_a_large_vocabulary_by_chi_square() -> None:
    """One draw each of 2,000 uniform numbers, in 40 ranges of ids."""
    weights, head = large()
    tail = weights.scatter(1, head, 0)[0]
    uniforms = rollout_noise(5, 3, 2000, draws=True)
    found = torch.cat(
        [
            draw_tail(weights.repeat(len(part), 1), head.expand(len(part), -1), part, 1).ids
            for part in uniforms.split(20)
        ]
    )
    bins = (torch.arange(len(tail)) * 40 // len(tail)).long()
    expected = torch.zeros(40, dtype=torch.float64).index_add(0, bins, tail / tail.sum()) * 2000
    seen = bins[found[:, 0].long()].bincount(minlength=40)
    assert float(((seen - expected) ** 2 / expected).sum()) < limit_of_chi_square(39)


def limit_of_chi_square(freedom: int) -> float:
    """Wilson and Hilferty: the cube root is close to normal; 4 standard deviations."""
    return float(freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_the_ends_of_the_levels(uniform: float) -> None:
    weights = torch.tensor([[0.0, 0.0, 0.5, 0.0, 0.2, 0.3, 0.0]], dtype=torch.float64)
    for count in (1, 3, 64):
        drawn = draw_tail(weights.clone(), NO_HEAD, torch.tensor([uniform]).double(), count)
        assert set(drawn.ids.flatten().tolist()) <= {2, 4, 5}
        assert drawn.logprobs.isfinite().all()


def test_a_row_without_a_tail_has_placeholders() -> None:
    weights = torch.rand(3, 80, dtype=torch.float64)
    weights[1, 2:] = 0.0
    head = torch.tensor([[0, 1]] * 3)
    drawn = draw_tail(weights, head, torch.full((3,), 0.9, dtype=torch.float64), 4)
    assert drawn.ids.dtype == torch.int32
    assert drawn.ids[1].tolist() == [0] * 4
    assert (drawn.logprobs[1] == torch.inf).all()
    assert drawn.logprobs[[0, 2]].isfinite().all()
    everything = torch.arange(80).expand(3, -1)
    assert (draw_tail(weights, everything, torch.zeros(3).double(), 4).logprobs == torch.inf).all()


def written(
    model: Any, numbers: Sequence[int], *, draws: int = M, top_k: int = 5, new: int = 8, **more: Any
) -> list[Rollout]:
    rollouts = HuggingFaceRollouts(
        model,
        tiny.tokenizer(),
        top_k=top_k,
        temperature=more.pop("temperature", 1.0),
        max_new_tokens=new,
        batch_tokens=more.pop("batch", 10_000),
        draws=draws,
    )
    prompts = more.pop("prompts", PROMPTS)
    batches = rollouts.generate(prompts, numbers, **{"seed": 3, **more})
    return [rollout for batch in batches for rollout in batch]


def drawn_ids(rollout: Rollout) -> list[list[int]]:
    assert rollout.draws is not None
    return rollout.draws.ids.tolist()


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_draws_are_those_of_a_whole_forward_pass(
    student: Any, temperature: float, top_k: int
) -> None:
    """They are of the tail of softmax(logits / temperature), the distribution of the loss."""
    rollouts = written(student, range(5), temperature=temperature, top_k=top_k)
    for number, rollout in enumerate(rollouts):
        exact = completion_logprobs(student, rollout, temperature)
        levels = rollout_noise(number, 3, len(exact), draws=True)
        wanted = draw_tail(exact.exp(), rollout.head_ids.long(), levels, M)
        assert rollout.draws is not None
        assert torch.equal(rollout.draws.ids, wanted.ids)
        torch.testing.assert_close(
            rollout.draws.logprobs, wanted.logprobs.float(), rtol=0, atol=1e-4
        )
        in_head = rollout.draws.ids[:, :, None] == rollout.head_ids[:, None, :]
        assert not in_head.any()


def test_tokens_are_the_same_with_and_without_draws(student: Any) -> None:
    generator = torch.Generator().manual_seed(3 * 1_000_000_007 + 7)
    assert torch.equal(
        rollout_noise(7, 3, 5), torch.rand(5, generator=generator, dtype=torch.float64)
    )
    for one, other in zip(
        written(student, range(5)), written(student, range(5), draws=0), strict=True
    ):
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.head_ids, other.head_ids)
        assert torch.equal(one.token_logprobs, other.token_logprobs)
        assert other.draws is None


def test_draws_depend_on_the_number_and_the_seed_alone(student: Any) -> None:
    numbers = [7, 2, 11, 5, 30]
    together = written(student, numbers)
    for others in (
        [written(student, [n], prompts=[p])[0] for p, n in zip(PROMPTS, numbers, strict=True)],
        written(student, numbers, batch=30),
        written(student, numbers[::-1], prompts=PROMPTS[::-1])[::-1],
    ):
        assert list(map(drawn_ids, together)) == list(map(drawn_ids, others))
    for one, longer in zip(together, written(student, numbers, new=12), strict=True):
        assert drawn_ids(longer)[: len(one.completion)] == drawn_ids(one)
    same = written(student, range(4), prompts=[PROMPTS[0]] * 4)
    assert len({str(drawn_ids(rollout)[0]) for rollout in same}) > 1
    other = written(student, range(4), prompts=[PROMPTS[0]] * 4, seed=4)
    assert [drawn_ids(one)[0] for one in same] != [drawn_ids(one)[0] for one in other]


def test_the_numbers_of_draws_are_of_another_stream() -> None:
    own, draws = rollout_noise(3, 1, 4000), rollout_noise(3, 1, 4000, draws=True)
    correlation = torch.corrcoef(torch.stack([own, draws]))[0, 1]
    assert abs(correlation) < 4 / math.sqrt(4000)
    assert abs(draws.mean() - 0.5) < 4 / math.sqrt(12 * 4000)
    assert torch.equal(draws[:10], rollout_noise(3, 1, 10, draws=True))
    rollout_noise(-1, 2**31, 1, draws=True)  # any seed and number that the tokens take


def test_top_p_and_ends_leave_the_draws_alone(student: Any) -> None:
    """Draws are of the policy before the nucleus, and only of tokens that are kept."""
    before = [torch.from_numpy(prompt.ids).long() for prompt in PROMPTS]
    noise = [rollout_noise(n, 3, 20) for n in range(5)]
    levels = [rollout_noise(n, 3, 20, draws=True) for n in range(5)]
    first = []
    for top_p in (1.0, 0.5):
        sampler = Sampler(student, tiny.tokenizer(), top_k=2, temperature=1.0, top_p=top_p, draws=M)
        found = sampler.write(before, [20, 3, 20, 20, 1], noise, draw_noise=levels)
        for one in found:
            assert one.draws is not None
            assert one.draws.ids.shape == one.draws.logprobs.shape == (len(one.token_ids), M)
        first.append([one.draws.ids[0].tolist() for one in found if one.draws is not None])
    assert first[0] == first[1]


def test_greedy_rollouts_have_no_draws(student: Any) -> None:
    assert all(rollout.draws is None for rollout in written(student, range(5), greedy=True))

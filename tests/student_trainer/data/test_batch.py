"""Rows are at their positions, and every token is trained on once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from protos.rows.codec import RowBlock
from student_trainer.data.batch import ScoredSequence, make_batch
from student_trainer.data.packing import micro_batches
from student_trainer.data.sequence import Rollout

CPU = torch.device("cpu")


def make_scored(tokens: list[int], start: int, heads: list[list[int]]) -> ScoredSequence:
    """Return a sequence with teacher log-probs -(token position), minus 0.1 in the head."""
    positions = np.arange(start, len(tokens), dtype=np.float32)
    return ScoredSequence(
        Rollout(
            token_ids=torch.tensor(tokens),
            start=start,
            head_ids=torch.tensor(heads),
            token_logprobs=torch.zeros(len(heads)),
            truncated=False,
            answer="",
        ),
        RowBlock(
            head_ids=np.array(heads, dtype=np.int32),
            head_logprobs=(-positions[:, None] - 0.1).repeat(2, 1).astype(np.float16),
            tail_logmass=-positions - 0.5,
            token_logprobs=-positions,
        ),
    )


def test_a_batch_made_by_hand() -> None:
    batch = make_batch(
        [
            make_scored([5, 6, 7], 1, [[6, 1], [2, 3]]),
            make_scored([8, 9, 4, 3, 2], 3, [[3, 1], [1, 0]]),
        ],
        CPU,
    )
    assert batch.input_ids.tolist() == [[5, 6, 7, 0, 0], [8, 9, 4, 3, 2]]
    assert batch.sequence.tolist() == [0, 0, 1, 1]
    assert batch.position.tolist() == [1, 2, 3, 4]
    assert batch.token_ids.tolist() == [6, 7, 3, 2]
    assert batch.head_ids.tolist() == [[6, 1], [2, 3], [3, 1], [1, 0]]
    assert batch.token_in_head.tolist() == [True, False, True, False]
    assert len(batch) == 4
    assert batch.teacher.token_logprobs.tolist() == [-1, -2, -3, -4]
    assert batch.teacher.tail_logmass.tolist() == [-1.5, -2.5, -3.5, -4.5]
    torch.testing.assert_close(
        batch.teacher.head_logprobs, -batch.position[:, None].float().repeat(1, 2) - 0.1, rtol=1e-3,
        atol=0,
    )  # fmt: skip


def test_row_t_comes_from_position_t_minus_1() -> None:
    batch = make_batch(
        [
            make_scored([5, 6, 7], 1, [[6, 1], [2, 3]]),
            make_scored([8, 9, 4, 3, 2], 3, [[3, 1], [1, 0]]),
        ],
        CPU,
    )
    # The output at (sequence, position) says so.
    outputs = torch.tensor([[[s, p] for p in range(5)] for s in range(2)])
    assert batch.select(outputs).tolist() == [[0, 0], [0, 1], [1, 2], [1, 3]]


@dataclass(frozen=True)
class Item:
    sequence: Rollout


def make_items(lengths: list[int]) -> list[Item]:
    empty = torch.zeros(0)
    return [Item(Rollout(torch.zeros(n), 1, empty, empty, False, "")) for n in lengths]


@pytest.mark.parametrize("max_tokens", [1, 7, 20, 64, 10_000])
def test_micro_batches_cover_everything_once(max_tokens: int) -> None:
    items = make_items([int(n) for n in np.random.default_rng(0).integers(2, 30, 50)])
    groups = micro_batches(items, max_tokens)
    flat = [id(item) for group in groups for item in group]
    assert sorted(flat) == sorted(id(item) for item in items)
    for group in groups:
        lengths = [len(item.sequence.token_ids) for item in group]
        assert len(group) == 1 or len(group) * max(lengths) <= max_tokens
    if max_tokens == 10_000:
        assert len(groups) == 1
    if max_tokens == 1:
        assert len(groups) == 50


def test_micro_batches_of_nothing() -> None:
    assert micro_batches(make_items([]), 10) == []

"""Stored rows by roles: each id of a permuted teacher becomes the student's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from protos.errors import InvalidInput
from protos.rows.codec import RowBlock
from student_trainer.teachers.role_store import RoleStore

# The teacher's id of each of the student's.
IDS = np.array([0, 1, 4, 2, 3, 5], np.int32)
OURS = {theirs: ours for ours, theirs in enumerate(IDS.tolist())}
STORED = [4, 2, 1, 3, 0, 5]


class Store:
    """One sequence of the teacher's ids, whose rows have heads and samples of it."""

    lengths = np.array([len(STORED)])

    def __init__(self, start: int) -> None:
        self.start = start
        count = len(STORED) - start
        random = np.random.default_rng(0)
        self.head = np.stack([random.permutation(6)[:3] for _ in range(count)]).astype(np.int32)
        self.samples = random.integers(0, 6, (count, 2)).astype(np.int32)
        numbers = np.arange(count, dtype=np.float32)
        head = np.outer(numbers, np.ones(3, np.float32))
        self.block = RowBlock(self.head, head, numbers, numbers, self.samples, numbers)

    def __len__(self) -> int:
        return 1

    def prompt_ids(self, index: int) -> np.ndarray:
        assert index == 0
        return np.array(STORED[: self.start], np.int32)

    def decoded(self, index: int) -> tuple[Any, RowBlock]:
        assert index == 0
        entry = SimpleNamespace(token_ids=np.array(STORED, "<i4").tobytes(), start=self.start)
        return entry, self.block


def ours(ids: Any) -> list[Any]:
    return [ours(one) if isinstance(one, list) else OURS[one] for one in ids]


@pytest.mark.parametrize("known", [True, False])
def test_ids_and_rows_are_the_students(known: bool) -> None:
    mine = np.array([5, 5, 5], np.int32)
    data: Any = Store(2 if known else 1)
    prompts = (lambda ids: mine if ids.tolist() == STORED[:2] else None) if known else None
    store = RoleStore(IDS, "abcdef", prompts)
    store.check(data, "store", 7)
    found = store.read(data, 0)
    rows = found.rows.result()
    before = mine.tolist() if known else ours(STORED[:1])
    assert found.sequence.token_ids.tolist() == [*before, *ours(STORED[data.start :])]
    assert found.sequence.start == len(before)
    assert rows.head_ids is not None
    assert rows.tail_sample_ids is not None
    assert rows.head_ids.tolist() == ours(data.head.tolist())
    assert rows.tail_sample_ids.tolist() == ours(data.samples.tolist())
    assert rows.token_logprobs is data.block.token_logprobs


def test_prompts_that_are_not_known_or_too_long() -> None:
    data: Any = Store(2)
    with pytest.raises(InvalidInput, match="sequence 0 of the store is in a chat") as caught:
        RoleStore(IDS, "abcdef", lambda _: None).check(data, "store", None)
    assert caught.value.field == "data.prompts"
    long = np.zeros(4, np.int32)
    with pytest.raises(InvalidInput, match="has 8 tokens with the student's prompt") as caught:
        RoleStore(IDS, "abcdef", lambda _: long).check(data, "store", 7)
    assert caught.value.field == "data.path"

"""Stored rows by roles: each id of a permuted teacher becomes the student's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from protos.errors import InvalidInput
from protos.rows.codec import RowBlock
from student_trainer.cross_tokenizer.special_token_store import SpecialTokenStore

# The teacher's id of each student id.
IDS = np.array([0, 1, 4, 2, 3, 5], np.int32)
STUDENT_IDS = {teacher_id: student_id for student_id, teacher_id in enumerate(IDS.tolist())}
STORED = [4, 2, 1, 3, 0, 5]


class RoleSource:
    """A data set of one sequence in the teacher's ids, whose rows have heads and samples."""

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


def map_ids(ids: Any) -> list[Any]:
    return [
        map_ids(token_id) if isinstance(token_id, list) else STUDENT_IDS[token_id]
        for token_id in ids
    ]


@pytest.mark.parametrize("has_prompts", [True, False])
def test_ids_and_rows_are_the_students(has_prompts: bool) -> None:
    student_prompt = np.array([5, 5, 5], np.int32)
    data: Any = RoleSource(2 if has_prompts else 1)
    prompts = (
        (lambda ids: student_prompt if ids.tolist() == STORED[:2] else None)
        if has_prompts
        else None
    )
    store = SpecialTokenStore(IDS, "abcdef", prompts)
    store.check(data, "store", 7)
    item = store.read(data, 0)
    rows = item.rows.result()
    prompt_ids = student_prompt.tolist() if has_prompts else map_ids(STORED[:1])
    assert item.sequence.token_ids.tolist() == [*prompt_ids, *map_ids(STORED[data.start :])]
    assert item.sequence.start == len(prompt_ids)
    assert rows.head_ids is not None
    assert rows.tail_sample_ids is not None
    assert rows.head_ids.tolist() == map_ids(data.head.tolist())
    assert rows.tail_sample_ids.tolist() == map_ids(data.samples.tolist())
    assert rows.token_logprobs is data.block.token_logprobs


def test_prompts_that_are_not_known_or_too_long() -> None:
    data: Any = RoleSource(2)
    with pytest.raises(InvalidInput, match="and the prompt has a chat template") as caught:
        SpecialTokenStore(IDS, "abcdef", lambda _: None).check(data, "store", None)
    assert caught.value.field == "data.prompts"
    long = np.zeros(4, np.int32)
    with pytest.raises(InvalidInput, match="has 8 tokens with the student's prompt") as caught:
        SpecialTokenStore(IDS, "abcdef", lambda _: long).check(data, "store", 7)
    assert caught.value.field == "data.path"

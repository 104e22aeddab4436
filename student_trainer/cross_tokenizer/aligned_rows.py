"""Batches for a teacher with another tokenizer: its log-probs, divided among student tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protos.rows.codec import RowBlock
from student_trainer.data.batch import Batch, ScoredSequence, copy_to_device, make_batch
from student_trainer.data.packing import Layout


@dataclass(frozen=True, kw_only=True)
class AlignedRows(RowBlock):
    """Rows of an answer of n tokens; `token_logprobs` are shares of the teacher's log-probs.

    - word [n] int64: the word of each token (for a store: its unit, which may be a chunk), from 0,
      without gaps.
    - learned [n] bool: tokens with a cost.
    - one_to_one [n] bool: tokens that match one teacher token.
    - spelled: the answer is the student's canonical encoding of its bytes.
    - weights [n, M]: weights of `tail_sample_ids` [n, M], see `mapped_kl`; only for stored rows.
      The head is a placeholder.
    """

    word: NDArray[np.int64]
    learned: NDArray[np.bool_]
    one_to_one: NDArray[np.bool_]
    spelled: bool
    weights: NDArray[np.float32] | None = None

    def take(self, places: NDArray[np.int64] | slice) -> AlignedRows:
        """Return the rows at `places` in this order, with unchanged word numbers."""
        columns = {
            name: column for name, column in vars(self).items() if isinstance(column, np.ndarray)
        }
        selected_columns: dict[str, Any] = {
            name: column[places] for name, column in columns.items()
        }
        return replace(self, **selected_columns)

    @classmethod
    def joined(cls, parts: Sequence[AlignedRows]) -> AlignedRows:
        """Concatenate the rows of at least one part."""
        columns = [
            name for name, column in vars(parts[0]).items() if isinstance(column, np.ndarray)
        ]
        joined_columns: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in columns
        }
        return replace(parts[0], **joined_columns, spelled=all(part.spelled for part in parts))


@dataclass(frozen=True, kw_only=True)
class AlignedBatch(Batch):
    """A batch of S answers with AlignedRows; `teacher.token_logprobs` [N] are shares.

    - word [N] int64, below N: the word of each token; two answers have no number in common.
    - learned, one_to_one [N] bool: as in AlignedRows.
    - spelled [S] bool.
    - left_out [S] bool: no token is learned.
    - weights [N, M]: the weights of `sample_ids`; None if the rows have no weights.
    """

    word: Tensor
    learned: Tensor
    one_to_one: Tensor
    spelled: Tensor
    left_out: Tensor
    weights: Tensor | None = None

    def without_rows(self) -> AlignedBatch:
        """Return a batch with one input token and no rows; see `Batch.without_rows`."""
        extra_fields = [
            batch_field.name
            for batch_field in fields(self)
            if batch_field.name not in _BATCH_FIELDS
        ]
        values = {name: getattr(self, name) for name in extra_fields}
        empty_values: dict[str, Any] = {
            field_name: tensor if tensor is None else tensor[:0]
            for field_name, tensor in values.items()
        }
        return AlignedBatch(**vars(super().without_rows()), **empty_values)


_BATCH_FIELDS = {batch_field.name for batch_field in fields(Batch)}


def make_aligned_batch(
    scored_sequences: Sequence[ScoredSequence], device: torch.device, layout: Layout
) -> AlignedBatch:
    """Build the tensors of one micro-batch of sequences with AlignedRows; see `make_batch`."""
    rows = [cast(AlignedRows, item.rows) for item in scored_sequences]
    word_offsets = np.cumsum([0, *map(len, rows)])[:-1]

    def concatenate(name: str) -> Tensor:
        columns = np.concatenate([getattr(block, name) for block in rows])
        return copy_to_device(torch.from_numpy(columns), device)

    words = [block.word + offset for block, offset in zip(rows, word_offsets, strict=True)]
    return AlignedBatch(
        **vars(make_batch(scored_sequences, device, layout)),
        word=copy_to_device(torch.from_numpy(np.concatenate(words)), device),
        learned=concatenate("learned"),
        one_to_one=concatenate("one_to_one"),
        spelled=copy_to_device(torch.tensor([block.spelled for block in rows]), device),
        left_out=copy_to_device(torch.tensor([not block.learned.any() for block in rows]), device),
        weights=None if rows[0].weights is None else concatenate("weights"),
    )

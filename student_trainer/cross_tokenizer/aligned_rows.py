"""Rows and batches for a teacher with another tokenizer.

The teacher's log-probs of an answer are divided among the student's tokens.
"""

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
    """The rows of an answer that has n student tokens.

    - token_logprobs [n]: the share of the teacher's log-probs that each student token has.
    - word [n] int64: the number of the word of each token, from 0, without gaps. In rows of a
      store, it is the number of the token's unit, which is a word or a chunk.
    - learned [n] bool: True for tokens with a cost.
    - one_to_one [n] bool: True for tokens that match exactly one teacher token.
    - spelled: True if the answer is the student's canonical encoding of its bytes.
    - weights [n, M]: the weights of `tail_sample_ids` [n, M], see `mapped_kl`; only for stored
      rows.

    The head is a placeholder.
    """

    word: NDArray[np.int64]
    learned: NDArray[np.bool_]
    one_to_one: NDArray[np.bool_]
    spelled: bool
    weights: NDArray[np.float32] | None = None

    def take(self, places: NDArray[np.int64] | slice) -> AlignedRows:
        """Return the rows at the positions `places`, in this order. Word numbers do not change."""
        columns = {
            name: column for name, column in vars(self).items() if isinstance(column, np.ndarray)
        }
        selected_columns: dict[str, Any] = {
            name: column[places] for name, column in columns.items()
        }
        return replace(self, **selected_columns)

    @classmethod
    def joined(cls, parts: Sequence[AlignedRows]) -> AlignedRows:
        """Return the concatenation of `parts`, at least one."""
        columns = [
            name for name, column in vars(parts[0]).items() if isinstance(column, np.ndarray)
        ]
        joined_columns: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in columns
        }
        return replace(parts[0], **joined_columns, spelled=all(part.spelled for part in parts))


@dataclass(frozen=True, kw_only=True)
class AlignedBatch(Batch):
    """A batch of S answers with AlignedRows. `teacher.token_logprobs` [N] are shares.

    - word [N] int64, below N: the number of the word of each token. Words of different answers have
      different numbers.
    - learned, one_to_one [N] bool: see `AlignedRows`.
    - spelled [S] bool: True if the answer is the student's canonical encoding of its bytes.
    - left_out [S] bool: True if no token of the answer is learned.
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

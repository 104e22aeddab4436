"""Batches of a teacher with another tokenizer: its log-probs as shares of the student's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protos.rows.codec import RowBlock
from student_trainer.data.batch import Batch, ScoredSequence, make_batch
from student_trainer.data.packing import Layout


@dataclass(frozen=True, kw_only=True)
class AlignedRows(RowBlock):
    """Rows of an answer of n tokens; `token_logprobs` are shares.

    word [n] int64: the word of each token (of a store: its unit, maybe a chunk), from 0, without
    gaps. learned [n] bool: tokens with a cost. one_to_one [n] bool: tokens that are one teacher
    token. spelled: the whole answer is the student's canonical encoding of its bytes. weights
    [n, M]: of the ids `tail_sample_ids` [n, M]; of stored rows only, see `mapped_kl`. matched
    [n, K] bool: head ids of the student whose `head_logprobs` the teacher has given, see
    `MatchedHead`; None: the head is a placeholder.
    """

    word: NDArray[np.int64]
    learned: NDArray[np.bool_]
    one_to_one: NDArray[np.bool_]
    spelled: bool
    weights: NDArray[np.float32] | None = None
    matched: NDArray[np.bool_] | None = None

    def taken(self, places: NDArray[np.int64] | slice) -> AlignedRows:
        """Return the rows at `places`, in that order, with words as they are."""
        columns = {name: of for name, of in vars(self).items() if isinstance(of, np.ndarray)}
        taken: dict[str, Any] = {name: of[places] for name, of in columns.items()}
        return replace(self, **taken)

    @classmethod
    def joined(cls, parts: Sequence[AlignedRows]) -> AlignedRows:
        """Return the rows of all parts, in order; there is at least one."""
        columns = [name for name, of in vars(parts[0]).items() if isinstance(of, np.ndarray)]
        made: dict[str, Any] = {
            name: np.concatenate([getattr(one, name) for one in parts]) for name in columns
        }
        return replace(parts[0], **made, spelled=all(one.spelled for one in parts))


@dataclass(frozen=True, kw_only=True)
class AlignedBatch(Batch):
    """A batch of S answers with AlignedRows; `teacher.token_logprobs` [N] are shares.

    word [N] int64, below N: different in every answer. learned, one_to_one [N] bool: as in
    AlignedRows. spelled [S] bool. left_out [S] bool: no token is learned. weights [N, M]: of
    `sample_ids`; matched [N, K] bool: of `head_ids`; None unless the rows have them.
    """

    word: Tensor
    learned: Tensor
    one_to_one: Tensor
    spelled: Tensor
    left_out: Tensor
    weights: Tensor | None = None
    matched: Tensor | None = None

    def without_rows(self) -> AlignedBatch:
        """Return a batch with one token to read and no rows; see `Batch.without_rows`."""
        own = [one.name for one in fields(self) if one.name not in _PLAIN]
        values = {name: getattr(self, name) for name in own}
        nothing: dict[str, Any] = {n: of if of is None else of[:0] for n, of in values.items()}
        return AlignedBatch(**vars(super().without_rows()), **nothing)


_PLAIN = {one.name for one in fields(Batch)}


def make_aligned_batch(
    scored: Sequence[ScoredSequence], device: torch.device, layout: Layout
) -> AlignedBatch:
    """Make the tensors of one micro-batch of sequences with AlignedRows; see `make_batch`."""
    rows = [cast(AlignedRows, item.rows) for item in scored]
    first = np.cumsum([0, *map(len, rows)])[:-1]

    def joined(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(one, name) for one in rows])).to(device)

    words = [of.word + before for of, before in zip(rows, first, strict=True)]
    return AlignedBatch(
        **vars(make_batch(scored, device, layout)),
        word=torch.from_numpy(np.concatenate(words)).to(device),
        learned=joined("learned"),
        one_to_one=joined("one_to_one"),
        spelled=torch.tensor([of.spelled for of in rows], device=device),
        left_out=torch.tensor([not of.learned.any() for of in rows], device=device),
        weights=None if rows[0].weights is None else joined("weights"),
        matched=None if rows[0].matched is None else joined("matched"),
    )

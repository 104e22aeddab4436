"""Sequences and the teacher's rows of them, as tensors of one forward pass.

Row convention: row t scores token t, it is the distribution over token t given the tokens before
it, so it comes out of the model at position t - 1. That shift is made in `Batch.select`, and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protos.rows.codec import RowBlock
from student_trainer.data.packing import places
from student_trainer.data.rollout import Rollout
from student_trainer.data.sequence import TokenSequence
from student_trainer.losses import Rows


@dataclass(frozen=True)
class ScoredSequence:
    """A sequence and the teacher's rows of it, one for each token that is learned."""

    sequence: TokenSequence
    rows: RowBlock


@dataclass(frozen=True)
class NumberedSequence(ScoredSequence):
    """One of several that are read in another order than theirs."""

    number: int


def unread(head_ids: NDArray[np.int32]) -> RowBlock:
    """Rows that nobody reads, at head ids [n, k] that somebody may."""
    none = np.zeros(len(head_ids), np.float32)
    return RowBlock(head_ids, np.zeros((len(head_ids), 0), np.float32), none, none)


@dataclass(frozen=True)
class Batch:
    """B lines of at most T tokens, and the N rows of the completions in them.

    input_ids [B, T], padded at the end; position_ids [B, T], where a line has several sequences;
    line, position [N]: where row n's token stands; sequence [N]: which one it is of; token_ids [N];
    head_ids [N, K]; teacher: Rows of N; sample_ids [N, M] of the teacher, if it drew any;
    sampling_logprobs [N] of the tokens by the student that wrote them, if one did; teachers: the
    name of who scored each sequence.
    """

    input_ids: Tensor
    position_ids: Tensor | None
    line: Tensor
    position: Tensor
    sequence: Tensor
    token_ids: Tensor
    head_ids: Tensor
    teacher: Rows
    sample_ids: Tensor | None
    sampling_logprobs: Tensor | None
    teachers: tuple[str, ...]

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """What the model reads. Without a mask: it finds the sequences by their positions."""
        if self.position_ids is None:
            return {"input_ids": self.input_ids}
        return {"input_ids": self.input_ids, "position_ids": self.position_ids}

    def select(self, outputs: Tensor) -> Tensor:
        """What a model put out for each row: [B, T, ...] -> [N, ...]."""
        return outputs[self.line, self.position - 1]

    @property
    def token_in_head(self) -> Tensor:
        return (self.head_ids == self.token_ids[:, None]).any(1)

    def without_rows(self) -> Batch:
        """One token to read, nothing to learn."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(Batch)}
        nothing: dict[str, Any] = {
            name: value if value is None else value[:0] for name, value in values.items()
        }
        return Batch(**nothing | {"input_ids": self.input_ids[:1, :1], "position_ids": None})

    def __len__(self) -> int:
        return len(self.token_ids)


def make_batch(
    scored: Sequence[ScoredSequence], device: torch.device, *, pack: bool = False
) -> Batch:
    """One micro-batch of `micro_batches`. Padding is at the end, where a causal model never looks.

    `pack`: several sequences share a line, which is as long as the longest of them.
    """
    texts = [item.sequence for item in scored]
    blocks = [item.rows for item in scored]
    lengths = [len(text.token_ids) for text in texts]
    width = max(lengths)
    placed = places(lengths, width, pack=pack)
    ids = torch.zeros(1 + max(line for line, _ in placed), width, dtype=torch.long)
    # Padding is a sequence of its own.
    positions = torch.arange(width).repeat(len(ids), 1)
    for text, (line, first) in zip(texts, placed, strict=True):
        last = first + len(text.token_ids)
        ids[line, first:last] = text.token_ids
        positions[line, first:] = torch.arange(width - first)
        positions[line, last:] = torch.arange(width - last)
    counts = torch.tensor([text.learned for text in texts])
    position = [first + text.places for text, (_, first) in zip(texts, placed, strict=True)]
    lines = torch.tensor([line for line, _ in placed]).repeat_interleave(counts)
    at = torch.cat(position)
    return Batch(
        input_ids=ids.to(device),
        position_ids=positions.to(device) if len(ids) < len(texts) else None,
        line=lines.to(device),
        position=at.to(device),
        sequence=torch.arange(len(texts)).repeat_interleave(counts).to(device),
        token_ids=ids[lines, at].to(device),
        head_ids=_ids([block.head_ids for block in blocks if block.head_ids is not None], device),
        teacher=teacher_rows(blocks, device),
        sample_ids=_sample_ids(blocks, device),
        sampling_logprobs=_sampling_logprobs(texts, device),
        teachers=tuple(t.teacher if isinstance(t, Rollout) else "" for t in texts),
    )


def teacher_rows(blocks: Sequence[RowBlock], device: torch.device) -> Rows:
    samples = [b.tail_sample_logprob for b in blocks if b.tail_sample_logprob is not None]
    return Rows(
        _floats([block.head_logprobs for block in blocks], device),
        _floats([block.tail_logmass for block in blocks], device),
        _floats([block.token_logprobs for block in blocks], device),
        _floats(samples, device)[:, None] if samples else None,
    )


def _sample_ids(blocks: Sequence[RowBlock], device: torch.device) -> Tensor | None:
    samples = [block.tail_sample_ids for block in blocks if block.tail_sample_ids is not None]
    return _ids(samples, device) if samples else None


def _sampling_logprobs(texts: Sequence[TokenSequence], device: torch.device) -> Tensor | None:
    sampled = [
        text.token_logprobs[text.places - text.start] for text in texts if isinstance(text, Rollout)
    ]
    return torch.cat(sampled).to(device) if sampled else None


def _floats(parts: Sequence[np.ndarray], device: torch.device) -> Tensor:
    # Widened where it is used: half as many bytes are copied on the way.
    return torch.from_numpy(np.concatenate(parts)).to(device).float()


def _ids(parts: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(device).long()

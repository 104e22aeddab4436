"""Rollouts and the teacher's rows of them, as tensors of one forward pass.

Row convention: row t scores token t, it is the distribution over token t given the tokens before
it, so it comes out of the model at position t - 1. That shift is made in `Batch.select`, and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from protos.rows import RowBlock
from student_trainer.losses import Rows
from student_trainer.rollouts import Rollout


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout and the teacher's rows of its completion, one a token."""

    rollout: Rollout
    rows: RowBlock


@dataclass(frozen=True)
class Batch:
    """B sequences of at most T tokens, and the N rows of their completions.

    input_ids [B, T], padded at the end; sequence, position [N]: where row n's token stands;
    token_ids [N]; head_ids [N, K]; teacher: Rows of N; sampling_logprobs [N] of the tokens by the
    policy that sampled them; teachers: the name of who scored each sequence.
    """

    input_ids: Tensor
    sequence: Tensor
    position: Tensor
    token_ids: Tensor
    head_ids: Tensor
    teacher: Rows
    sampling_logprobs: Tensor
    teachers: tuple[str, ...]

    def select(self, outputs: Tensor) -> Tensor:
        """What a model put out for each row: [B, T, ...] -> [N, ...]."""
        return outputs[self.sequence, self.position - 1]

    @property
    def token_in_head(self) -> Tensor:
        return (self.head_ids == self.token_ids[:, None]).any(1)

    def without_rows(self) -> Batch:
        """One token to read, nothing to learn."""
        values = {field.name: getattr(self, field.name)[:0] for field in fields(self)}
        return Batch(**values | {"input_ids": self.input_ids[:1, :1]})

    def __len__(self) -> int:
        return len(self.token_ids)


def make_batch(scored: Sequence[ScoredRollout], device: torch.device) -> Batch:
    """Padding is at the end, where a causal model never looks."""
    lengths = [len(item.rollout.token_ids) for item in scored]
    starts = [item.rollout.start for item in scored]
    ids = torch.zeros(len(scored), max(lengths), dtype=torch.long)
    for row, item in enumerate(scored):
        ids[row, : lengths[row]] = item.rollout.token_ids
    rows = [item.rows for item in scored]
    spans = list(zip(starts, lengths, strict=True))
    sequence = torch.cat([torch.full((b - a,), i) for i, (a, b) in enumerate(spans)])
    position = torch.cat([torch.arange(a, b) for a, b in spans])
    head_ids = np.concatenate([block.head_ids for block in rows if block.head_ids is not None])
    return Batch(
        input_ids=ids.to(device),
        sequence=sequence.to(device),
        position=position.to(device),
        token_ids=ids[sequence, position].to(device),
        head_ids=torch.from_numpy(head_ids.astype(np.int64)).to(device),
        teacher=Rows(
            _floats([block.head_logprobs for block in rows], device),
            _floats([block.tail_logmass for block in rows], device),
            _floats([block.token_logprobs for block in rows], device),
        ),
        sampling_logprobs=torch.cat([item.rollout.token_logprobs for item in scored]).to(device),
        teachers=tuple(item.rollout.teacher for item in scored),
    )


def _floats(parts: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.float32)).to(device)


class _HasRollout(Protocol):
    @property
    def rollout(self) -> Rollout: ...


Item = TypeVar("Item", bound=_HasRollout)


def micro_batches(items: Sequence[Item], max_tokens: int) -> list[list[Item]]:
    """Cut into groups of at most `max_tokens` padded tokens (or of one), longest first."""
    groups: list[list[Item]] = []
    width = 0
    for item in sorted(items, key=lambda item: -len(item.rollout.token_ids)):
        if not groups or (len(groups[-1]) + 1) * width > max_tokens:
            groups.append([])
            width = len(item.rollout.token_ids)
        groups[-1].append(item)
    return groups

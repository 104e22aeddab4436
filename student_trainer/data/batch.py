"""Builds the tensors of one forward pass, on the device, from sequences and their teacher rows.

Row convention: row t scores token t. Row t is the distribution of token t given the tokens before
it, so the model computes it at position t - 1. Only `Batch.select` applies this shift.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protos.rows.codec import RowBlock
from student_trainer.data.images import image_inputs
from student_trainer.data.packing import Layout, place_sequences
from student_trainer.data.sequence import Rollout, TailDraws, TokenSequence
from student_trainer.losses import Rows


@dataclass(frozen=True)
class ScoredSequence:
    """A sequence with one teacher row per learned token."""

    sequence: TokenSequence
    rows: RowBlock


@dataclass(frozen=True)
class NumberedSequence(ScoredSequence):
    """A sequence with its index in the caller's list, to restore the order after batching."""

    number: int


def placeholder_rows(
    head_ids: NDArray[np.int32], draw_ids: NDArray[np.int32] | None = None
) -> RowBlock:
    """Return placeholder rows: the given head ids [n, k] and draws [n, M], all log-probs 0.

    Code that reads only the ids of the rows uses them. The head log-probs are an empty array,
    float32 [n, 0].
    """
    zeros = np.zeros(len(head_ids), np.float32)
    draw_logprobs = None if draw_ids is None else zeros
    head_logprobs = np.zeros((len(head_ids), 0), np.float32)
    return RowBlock(head_ids, head_logprobs, zeros, zeros, draw_ids, draw_logprobs)


@dataclass(frozen=True)
class Batch:
    """The inputs of one forward pass: B lines of at most T tokens, and N rows.

    - input_ids [B, T] int64: the token ids of the lines, padded at the end.
    - position_ids [B, T] int64: the positions within each sequence; None if each line has one
      sequence.
    - line, position [N] int64: for each row, the line and the position of its learned token.
    - sequence [N] int64: the number of the sequence of each row, in the order of the sequences.
    - token_ids [N] int64: the learned tokens.
    - head_ids [N, K] int64: the head ids of each row.
    - teacher: the N rows of the teacher.
    - sample_ids [N, M] int64: ids that the teacher or the student drew from the tail; None without.
    - draw_logprobs [N, M] float32: log-probs of the student's draws; see `TailDraws.logprobs`.
    - sampling_logprobs [N] float32: log-probs in nats under the policy that sampled the tokens;
      None for stored sequences.
    - teachers: the name of the teacher of each sequence, "" if the job has one teacher.
    - sequence_weights [N] float32: the weight of the sequence of each row; None if all are 1.
    - images: the tensors that `image_inputs` returns; None if no sequence has an image.
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
    draw_logprobs: Tensor | None
    sampling_logprobs: Tensor | None
    teachers: tuple[str, ...]
    sequence_weights: Tensor | None = field(default=None, kw_only=True)
    images: Mapping[str, Tensor] | None = field(default=None, kw_only=True)

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """The keyword arguments of the model's forward pass.

        An attention mask is not needed: padding is at the end of a line, and the position ids
        separate the sequences of a line.
        """
        if self.position_ids is None:
            return {"input_ids": self.input_ids, **(self.images or {})}
        return {"input_ids": self.input_ids, "position_ids": self.position_ids}

    def select(self, outputs: Tensor) -> Tensor:
        """Select the model's output for each row: [B, T, ...] -> [N, ...]."""
        return outputs[self.line, self.position - 1]

    @property
    def token_in_head(self) -> Tensor:
        """[N] bool: True if the token of the row is one of the row's head ids."""
        return (self.head_ids == self.token_ids[:, None]).any(1)

    def without_rows(self) -> Batch:
        """Return a batch with one input token and no rows, for a rank without remaining work."""
        values: dict[str, Any] = {
            batch_field.name: getattr(self, batch_field.name) for batch_field in fields(Batch)
        }
        empty_values: dict[str, Any] = {
            name: value if value is None or name == "images" else value[:0]
            for name, value in values.items()
        }
        placeholders = {"input_ids": self.input_ids[:1, :1], "position_ids": None, "images": None}
        return Batch(**empty_values | placeholders)

    def to(self, device: torch.device) -> Self:
        """Return the batch with all tensors on `device`."""
        return replace(
            self, **{name: _move_to(value, device) for name, value in vars(self).items()}
        )

    def __len__(self) -> int:
        return len(self.token_ids)


def make_batch(
    scored_sequences: Sequence[ScoredSequence], device: torch.device, layout: Layout = "padded"
) -> Batch:
    """Build the tensors of one micro-batch on `device`.

    - scored_sequences: one of the groups that `micro_batches` returns.
    - layout: how sequences are placed in lines; see `packing.py`.

    A line is one index of the batch dimension B. A layout may place several sequences in a line.
    Padding is at the end of a line, where it does not affect a causal model.
    """
    sequences = [item.sequence for item in scored_sequences]
    blocks = [item.rows for item in scored_sequences]
    lengths = [len(sequence.token_ids) for sequence in sequences]
    width, placements = place_sequences(lengths, layout)
    ids = torch.zeros(1 + max(line for line, _ in placements), width, dtype=torch.long)
    # The padding of a line is a sequence of its own, from position 0.
    positions = torch.arange(width).repeat(len(ids), 1)
    for sequence, (line, first) in zip(sequences, placements, strict=True):
        last = first + len(sequence.token_ids)
        ids[line, first:last] = sequence.token_ids
        positions[line, first:] = torch.arange(width - first)
        positions[line, last:] = torch.arange(width - last)
    assert layout == "padded" or all(sequence.images is None for sequence in sequences), (
        "lines of one sequence"
    )
    counts = torch.tensor([sequence.learned for sequence in sequences])
    row_positions = [
        first + sequence.places for sequence, (_, first) in zip(sequences, placements, strict=True)
    ]
    draws = _join_draws(sequences)
    row_line = torch.tensor([line for line, _ in placements]).repeat_interleave(counts)
    row_position = torch.cat(row_positions)
    return Batch(
        input_ids=copy_to_device(ids, device),
        position_ids=copy_to_device(positions, device) if len(ids) < len(sequences) else None,
        line=copy_to_device(row_line, device),
        position=copy_to_device(row_position, device),
        sequence=copy_to_device(torch.arange(len(sequences)).repeat_interleave(counts), device),
        token_ids=copy_to_device(ids[row_line, row_position], device),
        head_ids=_to_id_tensor(
            [block.head_ids for block in blocks if block.head_ids is not None], device
        ),
        teacher=teacher_rows(blocks, device),
        sample_ids=_join_sample_ids(blocks, device)
        if draws is None
        else copy_to_device(draws.ids, device).long(),
        draw_logprobs=None if draws is None else copy_to_device(draws.logprobs, device),
        sampling_logprobs=_join_sampling_logprobs(sequences, device),
        sequence_weights=_expand_weights(sequences, counts, device),
        images=_move_to(image_inputs([sequence.images for sequence in sequences], ids), device),
        teachers=tuple(
            sequence.teacher if isinstance(sequence, Rollout) else "" for sequence in sequences
        ),
    )


def teacher_rows(blocks: Sequence[RowBlock], device: torch.device) -> Rows:
    """Return the concatenated teacher rows of all blocks, float32 on `device`.

    The field `sample_logprobs` of the result depends on the model that drew ids from its tail:

    - the student: [N, M], the teacher's log-prob of each of the M ids.
    - the teacher: [N, 1], the mean of the teacher's log-probs of its M ids.
    - none: None.
    """
    draws = [block.draw_logprobs for block in blocks if block.draw_logprobs is not None]
    means = [block.tail_sample_logprob for block in blocks if block.tail_sample_logprob is not None]
    samples = _to_float_tensor(draws, device) if draws else None
    return Rows(
        _to_float_tensor([block.head_logprobs for block in blocks], device),
        _to_float_tensor([block.tail_logmass for block in blocks], device),
        _to_float_tensor([block.token_logprobs for block in blocks], device),
        _to_float_tensor(means, device)[:, None] if means else samples,
    )


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of `tensor` on `device`, or `tensor` itself if it is already on `device`.

    A copy from the CPU to a GPU uses pinned memory and is queued behind the earlier operations of
    the GPU. Without pinned memory, the CPU would wait until these operations are done. A copy from
    a GPU is complete when the function returns.
    """
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=not tensor.is_cuda)


def _move_to(value: Any, device: torch.device) -> Any:
    """Return the value of a batch field on `device`: a tensor, rows, or a tuple or dict of them."""
    match value:
        case Tensor():
            return copy_to_device(value, device)
        case Rows():
            return value.map(lambda tensor: copy_to_device(tensor, device))
        case dict():
            return {name: _move_to(element, device) for name, element in value.items()}
        case tuple():
            return tuple(_move_to(element, device) for element in value)
    return value


def _join_sample_ids(blocks: Sequence[RowBlock], device: torch.device) -> Tensor | None:
    samples = [block.tail_sample_ids for block in blocks if block.tail_sample_ids is not None]
    return _to_id_tensor(samples, device) if samples else None


def _join_draws(sequences: Sequence[TokenSequence]) -> TailDraws | None:
    """Return the draws of the learned tokens of all rollouts; None if no rollout has draws."""
    draws = [
        sequence.draws[sequence.places - sequence.start]
        for sequence in sequences
        if isinstance(sequence, Rollout) and sequence.draws is not None
    ]
    return TailDraws.joined(draws) if draws else None


def _join_sampling_logprobs(
    sequences: Sequence[TokenSequence], device: torch.device
) -> Tensor | None:
    logprobs = [
        sequence.token_logprobs[sequence.places - sequence.start]
        for sequence in sequences
        if isinstance(sequence, Rollout)
    ]
    return copy_to_device(torch.cat(logprobs), device) if logprobs else None


def _expand_weights(
    sequences: Sequence[TokenSequence], counts: Tensor, device: torch.device
) -> Tensor | None:
    weights = [sequence.weight for sequence in sequences]
    if all(weight == 1 for weight in weights):
        return None
    return copy_to_device(torch.tensor(weights).repeat_interleave(counts), device)


def _to_float_tensor(parts: Sequence[np.ndarray], device: torch.device) -> Tensor:
    # Converted on the device: float16 rows are half as many bytes to copy.
    return copy_to_device(torch.from_numpy(np.concatenate(parts)), device).float()


def _to_id_tensor(parts: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return copy_to_device(torch.from_numpy(np.concatenate(parts)), device).long()


def sum_and_count(values: Tensor, applies: bool = True) -> Tensor:
    """Return (sum, number) of `values` [N] as a tensor [2]; (0, 0) if `applies` is False."""
    values = values if applies else values[:0]
    return torch.stack([values.sum(), values.new_full((), len(values))])


def sum_and_count_where(mask: Tensor, values: Tensor) -> Tensor:
    """Return (sum, number) of `values` [N] where `mask` [N] is True, as a tensor [2].

    Values outside the mask are replaced by 0. `values[mask]` would be slower: the CPU must wait for
    the GPU to know how many values it has.
    """
    selected = torch.where(mask, values, torch.zeros_like(values))
    return torch.stack([selected.sum(), mask.sum().to(values.dtype)])

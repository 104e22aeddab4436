"""Context parallelism: a group of processes divides the tokens of each sequence.

The method is from Jacobs et al., "DeepSpeed Ulysses" (arXiv 2309.14509). From the first layer to
the loss, process r of N has the tokens r, r + N, r + 2N, ... of each line. All modules except
attention process each token separately. For attention, the processes exchange data, so that each
process has all tokens of a share of the heads. A second exchange distributes the outputs by tokens
again. Any attention of transformers therefore runs unchanged, with the mask and the positions of
full lines.

Neighbouring tokens are in different processes. All processes therefore have about equally many
tokens of an answer, and about equally many rows of the loss.

Every process computes embeddings, masks and rotations of all tokens.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import numpy as np
import torch
import torch.distributed
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from clients.preflight.parallel import CONTEXT_FIELD as FIELD
from protos.errors import InvalidInput
from student_trainer.data.batch import Batch, ScoredSequence, make_batch, placeholder_rows
from student_trainer.data.sequence import TokenSequence
from student_trainer.losses import FusedLoss, Index, LossFunction, Rows
from student_trainer.model.student import Student
from student_trainer.parallel.collectives import raise_on_all_ranks

_NAME = "context_parallel"  # name under which transformers registers the attention
# Arguments of an attention that have a value for each head.
_PER_HEAD_ARGUMENTS = ("s_aux", "position_bias")


class ContextGroup:
    """A group of processes that divides the tokens of each sequence.

    size: the number of processes. rank: the rank of this process in the group.
    """

    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        self.group = group
        self.size = torch.distributed.get_world_size(group)
        self.rank = torch.distributed.get_rank(group)

    def divide(self, model: Any) -> None:
        """Change the layers of `model`, in place, so that they process only the tokens of this
        process.

        Afterwards, the forward pass of the model is collective in the group. Its inputs are full
        lines, whose length must be a multiple of `size`. Its outputs are the states or logits of
        this process's tokens.
        """
        for number, layer in enumerate(_find_layers(model)):
            layer.register_forward_pre_hook(
                self._select_own_embeddings if number == 0 else self._select_own_positions,
                with_kwargs=True,
            )
            for module in layer.modules():
                if hasattr(module, "is_causal") and hasattr(module, "config"):
                    self._divide_attention(module)

    def loss(
        self,
        student: Student,
        batch: Batch,
        loss_fn: LossFunction,
        temperature: float,
        needs_all_rows: bool = False,
    ) -> FusedLoss:
        """Collective in the group. Return the result of `Student.forward` for the whole batch.

        All processes of the group must pass the same batch, and get the same values. The gradient
        of the loss sum includes only the rows of this process. The sum of these gradients over the
        group is the gradient of the batch.
        """
        row_numbers, own_batch = self._select_own_batch(batch)

        def loss_of_own_rows(rows: Rows, index: Index) -> Tensor:
            return loss_fn(rows, row_numbers[index])

        def loss_of_all_rows(rows: Rows, _: Index) -> Tensor:
            all_columns = self._gather_rows(row_numbers, len(batch), _row_columns(rows))
            merged_columns = [
                all_rows.index_copy(0, row_numbers, own_rows)
                for all_rows, own_rows in zip(all_columns, _row_columns(rows), strict=True)
            ]
            return loss_fn(Rows(*merged_columns), slice(0, len(batch)))

        output = student(
            own_batch,
            loss_of_all_rows if needs_all_rows else loss_of_own_rows,
            temperature,
            needs_all_rows,
        )
        columns = [output.metrics["entropy"], *_row_columns(output.rows)]
        if needs_all_rows:
            losses, loss_sum = output.metrics["loss"], output.loss_sum
            entropy, *rows = self._gather_rows(row_numbers, len(batch), columns)
        else:
            columns = [output.metrics["loss"], *columns]
            losses, entropy, *rows = self._gather_rows(row_numbers, len(batch), columns)
            loss_sum = output.loss_sum + (losses.sum() - output.loss_sum).detach()
        return FusedLoss(loss_sum, Rows(*rows), {"loss": losses, "entropy": entropy})

    def rows(
        self, student: Student, batch: Batch, *settings: Any, **options: Any
    ) -> tuple[Tensor, Rows]:
        """Collective in the group. Return the result of `Student.rows` for the whole batch."""
        row_numbers, own_batch = self._select_own_batch(batch)
        own_head_ids, rows = student.rows(own_batch, *settings, **options)
        [ids] = self._gather_rows(row_numbers, len(batch), [own_head_ids])
        return ids, Rows(*self._gather_rows(row_numbers, len(batch), _row_columns(rows)))

    def all_states(self, student: Student, batch: Batch) -> Tensor:
        """Collective in the group. Return the result of `Student.states` for the whole batch."""
        row_numbers, own_states = self.states(student, batch)
        [all_states] = self._gather_rows(row_numbers, len(batch), [own_states])
        return all_states

    def states(self, student: Student, batch: Batch) -> tuple[Tensor, Tensor]:
        """Collective in the group.

        Return the row numbers [n] and the states [n, H] of this process. The states are the part of
        `Student.states` with these row numbers.
        """
        row_numbers, own_batch = self._select_own_batch(batch)
        return row_numbers, student.states(own_batch)

    def _select_own_batch(self, batch: Batch) -> tuple[Tensor, Batch]:
        """Return the row numbers [n] of this process, and the batch of these rows.

        The lines of the batch are padded to a multiple of `size`. `position` indexes the states of
        this process. Fields that only a loss reads keep the values of all rows.
        """
        padding = -batch.input_ids.shape[1] % self.size
        positions = batch.position_ids
        if positions is not None:  # the padding is a separate sequence, which starts at position 0
            padding_positions = torch.arange(padding, device=positions.device).expand(
                len(positions), -1
            )
            positions = torch.cat([positions, padding_positions], 1)
        state_positions = batch.position - 1  # the token whose state gives the row
        row_numbers = (state_positions % self.size == self.rank).nonzero().squeeze(1)
        samples = batch.sample_ids
        own_batch = replace(
            batch,
            input_ids=pad(batch.input_ids, (0, padding)),
            position_ids=positions,
            line=batch.line[row_numbers],
            position=state_positions[row_numbers] // self.size + 1,
            token_ids=batch.token_ids[row_numbers],
            head_ids=batch.head_ids[row_numbers],
            sample_ids=None if samples is None else samples[row_numbers],
        )
        return row_numbers, own_batch

    def _gather_rows(
        self, row_numbers: Tensor, count: int, columns: Sequence[Tensor]
    ) -> list[Tensor]:
        """Collective in the group. Return the values of all `count` rows, without a gradient.

        `columns`: the values [n] or [n, K] of this process's n rows, all in one dtype.
        `row_numbers`: the numbers [n] of these rows.
        """
        matrices = [values if values.ndim == 2 else values[:, None] for values in columns]
        own_values = torch.cat(matrices, 1).detach()
        all_values = own_values.new_zeros(count, own_values.shape[1])
        all_values[row_numbers] = own_values
        if all_values.numel():
            torch.distributed.all_reduce(all_values, group=self.group)
        column_values = torch.split(all_values, [values.shape[1] for values in matrices], 1)
        return [
            matrix if values.ndim == 2 else matrix[:, 0]
            for matrix, values in zip(column_values, columns, strict=True)
        ]

    def _select_own_embeddings(
        self, layer: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the embeddings in the first layer's inputs by those of this process's tokens.

        A forward pre-hook, which returns the new inputs. The embeddings are copied, so that the
        memory of the full tensor can be freed.
        """
        hidden, *other_inputs = inputs
        inputs = (self._select_own_tokens(hidden).contiguous(), *other_inputs)
        return self._select_own_positions(layer, inputs, options)

    def _select_own_positions(
        self, _: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the rotary embeddings in a layer's inputs by those of this process's tokens.

        A forward pre-hook, which returns the new inputs.
        """
        rotations = options.get("position_embeddings")
        if rotations is not None:
            own_rotations = tuple(self._select_own_tokens(rotation) for rotation in rotations)
            options = options | {"position_embeddings": own_rotations}
        return inputs, options

    def _select_own_tokens(self, values: Tensor) -> Tensor:
        """Select from `values` [B, T, ...] those of this process's tokens, [B, T / size, ...]."""
        return values[:, self.rank :: self.size]

    def _divide_attention(self, module: Any) -> None:
        """Change an attention module of transformers so that each process computes a share of the
        heads.
        """
        inner, repeats = copy.copy(module), 1
        if (heads_per_group := getattr(module, "num_key_value_groups", 1)) > 1:
            kv_heads = module.config.get_text_config().num_key_value_heads
            repeats = self.size // gcd(kv_heads, self.size)
            inner.num_key_value_groups = heads_per_group // repeats
        module.context = _Attention(self, inner, repeats)
        module.config = copy.copy(module.config)
        module.config._attn_implementation = _NAME


@dataclass
class _Attention:
    """The state of an attention module that `ContextGroup` has divided.

    - group: the group that divides the heads.
    - inner: a copy of the module that still has the original attention.
    - repeats: how often each key and value head is repeated, so that all processes get equally
      many.
    - was_called: whether a forward pass has used the module.
    """

    group: ContextGroup
    inner: Any
    repeats: int
    was_called: bool = False


class _Exchange(torch.autograd.Function):
    """All-to-all exchange: sends parts[i] to process i of the group, and returns the received
    parts.

    `parts` and the result are [size, ...].
    """

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        received_parts = torch.empty_like(parts)
        torch.distributed.all_to_all_single(received_parts, parts, group=group)
        return received_parts

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchange_parts(gradient, ctx.group), None


def _exchange_parts(parts: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    received_parts: Tensor = _Exchange.apply(parts.contiguous(), group)  # type: ignore[no-untyped-call]
    return received_parts


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Collective in the group.

    Compute the attention of full lines for this process's share of heads. `query`, `key` and
    `value` [B, heads, T / size, width] are those of this process's tokens. The result is [B, T /
    size, heads, width]. `mask` and `options` are those of full lines.
    """
    divided: _Attention = module.context
    divided.was_called = True
    if per_head := [name for name in _PER_HEAD_ARGUMENTS if options.get(name) is not None]:
        raise ValueError(f"its attention has {per_head[0]}, a value for each head")
    inner = divided.inner
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(
        inner.config._attn_implementation,
        getattr(sys.modules[type(module).__module__], "eager_attention_forward", None),
    )
    if divided.repeats > 1:
        key, value = (states.repeat_interleave(divided.repeats, 1) for states in (key, value))
    all_tokens = (_exchange_for_heads(states, divided.group) for states in (query, key, value))
    output, _ = attention(inner, *all_tokens, mask, **options)
    return _exchange_for_tokens(output, divided.group), None


def _exchange_for_heads(states: Tensor, group: ContextGroup) -> Tensor:
    """Collective in the group. Exchange the states of own tokens for the states of own heads.

    `states`: [B, heads, T / size, width]. The result is [B, heads / size, T, width].
    """
    lines, heads, tokens, width = states.shape
    parts = states.reshape(lines, group.size, heads // group.size, tokens, width).movedim(1, 0)
    exchanged = _exchange_parts(parts, group.group)  # [size, B, heads / size, T / size, width]
    return exchanged.movedim(0, 3).flatten(2, 3)


def _exchange_for_tokens(output: Tensor, group: ContextGroup) -> Tensor:
    """Collective in the group. Exchange the outputs of own heads for the outputs of own tokens.

    `output`: [B, T, heads / size, width]. The result is [B, T / size, heads, width].
    """
    lines, tokens, heads, width = output.shape
    parts = output.reshape(lines, tokens // group.size, group.size, heads, width).movedim(2, 0)
    exchanged = _exchange_parts(parts, group.group)  # [size, B, T / size, heads / size, width]
    return exchanged.movedim(0, 2).flatten(2, 3)


def check_divided(
    accelerator: Accelerator, group: ContextGroup, divided: Student, full: Student
) -> None:
    """Collective. Check, on a few tokens, that `divided` and `full` compute the same states.

    `divided`: the student whose layers `group` has divided. `full`: an undivided student with the
    same weights. Raises InvalidInput (`train.context_parallel`) if the states differ.
    """
    raise_on_all_ranks(accelerator, lambda: _check_divided(group, divided, full))


def _check_divided(group: ContextGroup, divided: Student, full: Student) -> None:
    text_config = full.model.config.get_text_config()
    lengths = (2 * group.size + 3, group.size + 1, 2)  # the last two may share a line
    texts = [TokenSequence(torch.arange(n) * 7 % text_config.vocab_size, 1) for n in lengths]
    rows = [placeholder_rows(np.zeros((text.learned, 1), np.int32)) for text in texts]
    scored_sequences = [ScoredSequence(*pair) for pair in zip(texts, rows, strict=True)]
    batch = make_batch(scored_sequences, full.model.device, full.layout)
    for student in (divided, full):
        student.eval()
    try:
        row_numbers, states = group.states(divided, batch)
        expected = full.states(batch)[row_numbers]
    except Exception as error:  # any part of the model may fail
        reason = str(error).strip().splitlines()[0]
        raise _build_error(
            full.model, f"its forward pass fails with a part of them ({reason})"
        ) from error
    for layer in _find_layers(divided.model):
        if not any(
            isinstance(attention, _Attention) and attention.was_called
            for attention in [vars(module).get("context") for module in layer.modules()]
        ):
            name = type(layer).__name__.removeprefix("FSDP")
            reason = f"its {name} does not use the attention interface of transformers"
            raise _build_error(full.model, reason)
    # Products of float32 matrices may be TF32 on a GPU, which is a little better than bfloat16.
    if not (states - expected).norm() <= 2e-2 * expected.norm():
        raise _build_error(full.model, "a layer other than attention reads several tokens")


def _build_error(model: Any, why: str) -> InvalidInput:
    return InvalidInput(
        f"the tokens of {type(model).__name__} cannot be divided over processes: {why}",
        field=FIELD,
        hint="remove the key",
    )


def _row_columns(rows: Rows) -> list[Tensor]:
    """Return the tensors of `rows`, in the order of the arguments of `Rows`."""
    return [values for values in vars(rows).values() if values is not None]


def _find_layers(model: Any) -> list[nn.Module]:
    names = model._no_split_modules or ()
    return [
        module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names
    ]


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)

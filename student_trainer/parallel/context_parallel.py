"""Context parallelism: the tokens of each sequence, divided over a group of processes.

Jacobs et al., "DeepSpeed Ulysses" (arXiv 2309.14509). Between the first layer and the loss, process
r of N has the tokens r, r + N, r + 2N, ... of each line, and everything but attention reads each
token alone. For attention, an exchange among the processes gives each of them all tokens, and a
share of the heads; a second exchange returns the outputs. So any attention of transformers runs
unchanged, with the mask and the positions of whole lines. With neighbours in different processes,
all processes have as many tokens of an answer, hence as many rows of the loss.

Embeddings, masks and rotations are computed in full in every process.
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

from clients.preflight.context_parallel import FIELD
from protos.errors import InvalidInput
from student_trainer.data.batch import Batch, ScoredSequence, make_batch, placeholder_rows
from student_trainer.data.sequence import TokenSequence
from student_trainer.losses import FusedLoss, Index, LossFunction, Rows
from student_trainer.model.student import Student
from student_trainer.parallel.collectives import raise_on_all_ranks

_NAME = "context_parallel"  # of the attention, in transformers
# Arguments of an attention with a value for each head.
_OF_HEADS = ("s_aux", "position_bias")


class ContextGroup:
    """The processes that share the tokens of each sequence.

    size: their number. rank: of this process among them.
    """

    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        self.group = group
        self.size = torch.distributed.get_world_size(group)
        self.rank = torch.distributed.get_rank(group)

    def divide(self, model: Any) -> None:
        """Let the layers of `model` read this process's tokens, in place.

        The model's forward pass is then collective in the group, takes whole lines, whose length
        `size` divides, and returns the states or the logits of the tokens of this process.
        """
        for number, layer in enumerate(_layers(model)):
            layer.register_forward_pre_hook(
                self._own_embeddings if number == 0 else self._own_positions, with_kwargs=True
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

        All processes of the group have the same batch and get the same result. The gradients of
        its sum are those of the rows of this process; added up over the group, they are those of
        the batch.
        """
        own, part = self._part(batch)

        def of_own(rows: Rows, index: Index) -> Tensor:
            return loss_fn(rows, own[index])

        def of_all(rows: Rows, _: Index) -> Tensor:
            whole = self._whole(own, len(batch), _columns(rows))
            joined = [
                all_rows.index_copy(0, own, own_rows)
                for all_rows, own_rows in zip(whole, _columns(rows), strict=True)
            ]
            return loss_fn(Rows(*joined), slice(0, len(batch)))

        out = student(part, of_all if needs_all_rows else of_own, temperature, needs_all_rows)
        columns = [out.metrics["entropy"], *_columns(out.rows)]
        if needs_all_rows:
            losses, loss_sum = out.metrics["loss"], out.loss_sum
            entropy, *rows = self._whole(own, len(batch), columns)
        else:
            columns = [out.metrics["loss"], *columns]
            losses, entropy, *rows = self._whole(own, len(batch), columns)
            loss_sum = out.loss_sum + (losses.sum() - out.loss_sum).detach()
        return FusedLoss(loss_sum, Rows(*rows), {"loss": losses, "entropy": entropy})

    def rows(
        self, student: Student, batch: Batch, *settings: Any, **options: Any
    ) -> tuple[Tensor, Rows]:
        """Collective in the group. Return the result of `Student.rows` for the whole batch."""
        own, part = self._part(batch)
        head, rows = student.rows(part, *settings, **options)
        [ids] = self._whole(own, len(batch), [head])
        return ids, Rows(*self._whole(own, len(batch), _columns(rows)))

    def all_states(self, student: Student, batch: Batch) -> Tensor:
        """Collective in the group. Return the result of `Student.states` for the whole batch."""
        own, states = self.states(student, batch)
        [found] = self._whole(own, len(batch), [states])
        return found

    def states(self, student: Student, batch: Batch) -> tuple[Tensor, Tensor]:
        """Collective in the group. Return the numbers [n] of this process's rows, and their states.

        The states are [n, H], as `Student.states` returns them.
        """
        own, part = self._part(batch)
        return own, student.states(part)

    def _part(self, batch: Batch) -> tuple[Tensor, Batch]:
        """Return the numbers [n] of this process's rows, and what the student reads of the batch.

        Its lines are padded for the group. Its rows are those of this process, at their positions
        among the states of this process. Fields that only a loss reads are those of the batch.
        """
        extra = -batch.input_ids.shape[1] % self.size
        positions = batch.position_ids
        if positions is not None:  # the padding is a sequence of its own, from position 0
            more = torch.arange(extra, device=positions.device).expand(len(positions), -1)
            positions = torch.cat([positions, more], 1)
        read = batch.position - 1  # the token whose state gives the row
        own = (read % self.size == self.rank).nonzero().squeeze(1)
        samples = batch.sample_ids
        part = replace(
            batch,
            input_ids=pad(batch.input_ids, (0, extra)),
            position_ids=positions,
            line=batch.line[own],
            position=read[own] // self.size + 1,
            token_ids=batch.token_ids[own],
            head_ids=batch.head_ids[own],
            sample_ids=None if samples is None else samples[own],
        )
        return own, part

    def _whole(self, own: Tensor, count: int, columns: Sequence[Tensor]) -> list[Tensor]:
        """Collective in the group. Return values of all `count` rows, without a gradient.

        `columns`: values of this process's rows, [n] or [n, K], in one dtype. `own` [n]: their
        numbers.
        """
        wide = [values if values.ndim == 2 else values[:, None] for values in columns]
        joined = torch.cat(wide, 1).detach()
        whole = joined.new_zeros(count, joined.shape[1])
        whole[own] = joined
        if whole.numel():
            torch.distributed.all_reduce(whole, group=self.group)
        parts = torch.split(whole, [values.shape[1] for values in wide], 1)
        return [
            part if values.ndim == 2 else part[:, 0]
            for part, values in zip(parts, columns, strict=True)
        ]

    def _own_embeddings(
        self, layer: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs of the first layer: of its embeddings, only those of own tokens.

        A forward pre-hook. The embeddings are copied, so that those of the others can be freed.
        """
        hidden, *others = inputs
        inputs = (self._own_tokens(hidden).contiguous(), *others)
        return self._own_positions(layer, inputs, options)

    def _own_positions(
        self, _: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs of a layer: of its rotations, only those of own tokens.

        A forward pre-hook.
        """
        rotations = options.get("position_embeddings")
        if rotations is not None:
            own = tuple(self._own_tokens(one) for one in rotations)
            options = options | {"position_embeddings": own}
        return inputs, options

    def _own_tokens(self, values: Tensor) -> Tensor:
        """Return the values [B, T / size, ...] of own tokens, of the values [B, T, ...] of all."""
        return values[:, self.rank :: self.size]

    def _divide_attention(self, module: Any) -> None:
        """Let an attention module of transformers run on a share of the heads."""
        inner, repeats = copy.copy(module), 1
        if (grouped := getattr(module, "num_key_value_groups", 1)) > 1:
            kv_heads = module.config.get_text_config().num_key_value_heads
            repeats = self.size // gcd(kv_heads, self.size)
            inner.num_key_value_groups = grouped // repeats
        module.context = _Attention(self, inner, repeats)
        module.config = copy.copy(module.config)
        module.config._attn_implementation = _NAME


@dataclass
class _Attention:
    """An attention module as it was before `ContextGroup` divided it, `inner`.

    repeats: how often each head of keys and values is repeated, so that all processes get as many.
    used: whether a forward pass has called it.
    """

    group: ContextGroup
    inner: Any
    repeats: int
    used: bool = False


class _Exchange(torch.autograd.Function):
    """Send part i of [size, ...] to process i of the group; return the received parts, stacked."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        torch.distributed.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradient, ctx.group), None


def _exchanged(parts: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    received: Tensor = _Exchange.apply(parts.contiguous(), group)  # type: ignore[no-untyped-call]
    return received


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Compute the attention of whole lines on this process's heads; collective in the group.

    query, key and value are [B, heads, T / size, width], of own tokens; the result is
    [B, T / size, heads, width]. The other arguments are those of whole lines.
    """
    divided: _Attention = module.context
    divided.used = True
    if of_heads := [name for name in _OF_HEADS if options.get(name) is not None]:
        raise ValueError(f"its attention has {of_heads[0]}, a value for each head")
    inner = divided.inner
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(
        inner.config._attn_implementation,
        getattr(sys.modules[type(module).__module__], "eager_attention_forward", None),
    )
    if divided.repeats > 1:
        key, value = (one.repeat_interleave(divided.repeats, 1) for one in (key, value))
    whole = (_for_heads(one, divided.group) for one in (query, key, value))
    output, _ = attention(inner, *whole, mask, **options)
    return _for_tokens(output, divided.group), None


def _for_heads(states: Tensor, group: ContextGroup) -> Tensor:
    """Exchange [B, heads, T / size, width] of own tokens for [B, heads / size, T, width]."""
    lines, heads, tokens, width = states.shape
    parts = states.reshape(lines, group.size, heads // group.size, tokens, width).movedim(1, 0)
    received = _exchanged(parts, group.group)  # [size, B, heads / size, T / size, width]
    return received.movedim(0, 3).flatten(2, 3)


def _for_tokens(output: Tensor, group: ContextGroup) -> Tensor:
    """Exchange [B, T, heads / size, width] of own heads for [B, T / size, heads, width]."""
    lines, tokens, heads, width = output.shape
    parts = output.reshape(lines, tokens // group.size, group.size, heads, width).movedim(2, 0)
    received = _exchanged(parts, group.group)  # [size, B, T / size, heads / size, width]
    return received.movedim(0, 2).flatten(2, 3)


def check_divided(
    accelerator: Accelerator, group: ContextGroup, divided: Student, full: Student
) -> None:
    """Collective. Check on a few tokens that `divided` computes what `full` computes.

    `divided`: the student with the layers that `group` has divided. `full`: the same student,
    undivided, with its weights. Raises InvalidInput (`train.context_parallel`).
    """
    raise_on_all_ranks(accelerator, lambda: _check_divided(group, divided, full))


def _check_divided(group: ContextGroup, divided: Student, full: Student) -> None:
    sizes = full.model.config.get_text_config()
    lengths = (2 * group.size + 3, group.size + 1, 2)  # the last two may share a line
    texts = [TokenSequence(torch.arange(n) * 7 % sizes.vocab_size, 1) for n in lengths]
    rows = [placeholder_rows(np.zeros((one.learned, 1), np.int32)) for one in texts]
    scored = [ScoredSequence(*pair) for pair in zip(texts, rows, strict=True)]
    batch = make_batch(scored, full.model.device, full.layout)
    for student in (divided, full):
        student.eval()
    try:
        own, found = group.states(divided, batch)
        expected = full.states(batch)[own]
    except Exception as error:  # of any part of the model
        reason = str(error).strip().splitlines()[0]
        raise _refused(
            full.model, f"its forward pass fails with a part of them ({reason})"
        ) from error
    for layer in _layers(divided.model):
        if not any(isinstance(of, _Attention) and of.used for of in _attentions(layer)):
            name = type(layer).__name__.removeprefix("FSDP")
            why = f"its {name} does not use the attention interface of transformers"
            raise _refused(full.model, why)
    # Products of float32 matrices may be TF32 on a GPU, which is a little better than bfloat16.
    if not (found - expected).norm() <= 2e-2 * expected.norm():
        raise _refused(full.model, "something else than its attention reads several tokens")


def _attentions(layer: nn.Module) -> list[Any]:
    return [vars(module).get("context") for module in layer.modules()]


def _refused(model: Any, why: str) -> InvalidInput:
    return InvalidInput(
        f"the tokens of {type(model).__name__} cannot be divided over processes: {why}",
        field=FIELD,
        hint="leave it out",
    )


def _columns(rows: Rows) -> list[Tensor]:
    """Return the tensors of rows, in the order of the arguments of `Rows`."""
    return [values for values in vars(rows).values() if values is not None]


def _layers(model: Any) -> list[nn.Module]:
    names = model._no_split_modules or ()
    return [one for one in model.modules() if type(one).__name__.removeprefix("FSDP") in names]


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)

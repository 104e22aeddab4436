"""Computes any loss of rows from hidden states, without the full tensor of logits [N, V].

Rows are processed in chunks. The logits of a chunk are computed once, in one buffer. Then exp(z)
and the gradient overwrite this buffer (`chunk.py`). The forward pass already computes the
gradients, and the backward pass only scales them. The total cost is three matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from student_trainer.losses.fused.chunk import make_chunk
from student_trainer.losses.fused.logit_map import LogitMap
from student_trainer.losses.fused.projection import HeadGradients, logit_chunks, wide_dtype
from student_trainer.losses.rows import Index, Rows

# (rows, index) -> weighted losses [n] of the rows at `index` of the batch.
LossFunction = Callable[[Rows, Index], Tensor]
# Head ids, token ids and sample ids, with shapes as in fused_linear_loss.
_Ids = tuple[Tensor, Tensor, Tensor | None]
_PLAIN = LogitMap()


@dataclass(frozen=True)
class FusedLoss:
    """The result of a fused loss. Only `loss_sum` has a gradient; the other fields are detached.

    - loss_sum: a scalar, the sum over the rows.
    - rows: the N rows of the student.
    - metrics: [N] each. "loss" is the result of `loss_fn`, "entropy" is the student's, in nats.
    """

    loss_sum: Tensor
    rows: Rows
    metrics: Mapping[str, Tensor]


def fused_linear_loss(
    hidden: Tensor,
    weight: Tensor,
    head_ids: Tensor,
    token_ids: Tensor,
    loss_fn: LossFunction,
    *,
    sample_ids: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_map: LogitMap = _PLAIN,
    chunk_rows: int | None = None,
) -> FusedLoss:
    """Return the sum of `loss_fn` over the rows of softmax(logits / temperature).

    The logits are hidden @ weight.T + bias. `logit_map` then limits them to the vocabulary, and
    scales and caps them.

    - hidden [N, H], weight [V, H], bias [V].
    - head_ids [N, K] int64: distinct within a row.
    - token_ids [N] int64.
    - loss_fn: called once per chunk, with the rows of the chunk and their slice of the batch. If
      the loss of a row depends on other rows, use `fused_linear_rows` instead.
    - sample_ids [N, M] int64: ids drawn from the tail, possibly repeated.
    - chunk_rows: rows per chunk; None chooses it by V and the device's memory.

    Rows and losses are float32, or float64 if `hidden` is float64.

    Only one backward pass of first order is possible. A second one, or one with create_graph=True,
    raises RuntimeError.
    """
    loss, losses, entropy, *rows = _FusedLinearLoss.apply(  # type: ignore[no-untyped-call]
        *_prepare_inputs(hidden, weight, bias),
        (head_ids, token_ids, sample_ids),
        loss_fn,
        logit_map,
        temperature,
        chunk_rows,
    )
    return FusedLoss(loss, Rows(*rows), {"loss": losses, "entropy": entropy})


class _FusedLinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: _Ids,
        loss_fn: LossFunction,
        logit_map: LogitMap,
        temperature: float,
        chunk_rows: int | None,
    ) -> tuple[Tensor, ...]:
        gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad)
        weight, bias = logit_map.narrow(weight, bias)
        # Under mixed precision the weights are float32 and the states bf16.
        weight, curve = weight.to(hidden.dtype), logit_map.curve(temperature)
        empty = hidden.new_zeros(0, dtype=wide_dtype(hidden))
        chunk_results: list[tuple[Tensor, ...]] = [(empty, empty, *_empty_rows(empty, ids))]
        for index, logits in logit_chunks(hidden, weight, bias, chunk_rows):
            chunk = make_chunk(logits, *_slice_ids(ids, index), curve)
            if any(ctx.needs_input_grad):
                losses, row_gradients = _derivatives(loss_fn, chunk.rows, index)
                gradients.add(index, chunk.gradient(row_gradients, hidden.dtype), hidden, weight)
            else:
                losses = loss_fn(chunk.rows, index)
            chunk_results.append((losses, chunk.entropy, *_list_tensors(chunk.rows)))
        parts = [torch.cat(parts) for parts in zip(*chunk_results, strict=True)]
        # Do not use save_for_backward: backward scales the gradients in place, because the gradient
        # of the weight is large.
        ctx.gradients = gradients
        ctx.mark_non_differentiable(*parts)
        return parts[0].sum(), *parts

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: they would silently be 0
            raise RuntimeError("a fused loss has no second derivatives; use create_graph=False")
        if ctx.gradients is None:
            raise RuntimeError("a fused loss can be differentiated once; compute the loss again")
        gradients, ctx.gradients = ctx.gradients, None
        return (*gradients.scale_by(grad_loss), *[None] * 5)


def _derivatives(loss_fn: LossFunction, rows: Rows, index: slice) -> tuple[Tensor, Rows]:
    """Return the losses [n], and the derivatives of the sum of the losses by the rows."""
    with torch.enable_grad():
        leaves = rows.map(lambda values: values.detach().requires_grad_())
        losses = loss_fn(leaves, index)
        inputs = _list_tensors(leaves)
        gradients = torch.autograd.grad(losses.sum(), inputs, allow_unused=True)
    row_gradients = [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(inputs, gradients, strict=True)
    ]
    return losses.detach(), Rows(*row_gradients)


def fused_linear_rows(
    hidden: Tensor,
    weight: Tensor,
    head_ids: Tensor,
    token_ids: Tensor,
    *,
    sample_ids: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_map: LogitMap = _PLAIN,
    chunk_rows: int | None = None,
) -> tuple[Rows, Tensor]:
    """Return differentiable rows and the detached entropy [N] in nats, without [N, V] logits.

    Use this function for a loss in which a row depends on other rows, such as a ratio of whole
    sequences or a whitened advantage. The backward pass computes the logits again, so the cost is
    four matrix products instead of three. The arguments are described in `fused_linear_loss`.
    """
    entropy, *rows = _FusedLinearRows.apply(  # type: ignore[no-untyped-call]
        *_prepare_inputs(hidden, weight, bias),
        (head_ids, token_ids, sample_ids),
        logit_map,
        temperature,
        chunk_rows,
    )
    return Rows(*rows), entropy


class _FusedLinearRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: _Ids,
        logit_map: LogitMap,
        temperature: float,
        chunk_rows: int | None,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.ids, ctx.logit_map, ctx.chunk_rows = ids, logit_map, chunk_rows
        ctx.curve = curve = logit_map.curve(temperature)
        weight, bias = logit_map.narrow(weight, bias)
        empty = hidden.new_zeros(0, dtype=wide_dtype(hidden))
        chunk_results: list[tuple[Tensor, ...]] = [(empty, *_empty_rows(empty, ids))]
        for index, logits in logit_chunks(hidden, weight.to(hidden.dtype), bias, chunk_rows):
            chunk = make_chunk(logits, *_slice_ids(ids, index), curve)
            chunk_results.append((chunk.entropy, *_list_tensors(chunk.rows)))
        parts = tuple(torch.cat(parts) for parts in zip(*chunk_results, strict=True))
        ctx.mark_non_differentiable(parts[0])
        return parts

    @staticmethod
    def backward(ctx: Any, _: Tensor, *row_gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad)
        weight, bias = ctx.logit_map.narrow(weight, bias)
        weight = weight.to(hidden.dtype)
        for index, logits in logit_chunks(hidden, weight, bias, ctx.chunk_rows):
            chunk = make_chunk(logits, *_slice_ids(ctx.ids, index), ctx.curve)
            logit_gradients = chunk.gradient(Rows(*row_gradients)[index], hidden.dtype)
            gradients.add(index, logit_gradients, hidden, weight)
        return (*gradients.scale_by(None), *[None] * 4)


@torch.no_grad()
def fused_linear_top_ids(
    hidden: Tensor,
    weight: Tensor,
    top_k: int,
    *,
    bias: Tensor | None = None,
    logit_map: LogitMap = _PLAIN,
) -> Tensor:
    """Return the ids [N, top_k] int64 of the `top_k` largest logits of each row, largest first.

    The products are computed in chunks, never [N, V] at once. Logits increase with the products, so
    the ids with the largest products are selected. No gradient.
    """
    hidden, weight, bias = _prepare_inputs(hidden, weight, bias)
    weight, bias = logit_map.narrow(weight, bias)
    top_ids = [hidden.new_zeros(0, top_k, dtype=torch.long)]
    for _, logits in logit_chunks(hidden, weight.to(hidden.dtype), bias, None):
        top_ids.append(logits.topk(top_k, dim=1).indices)
    return torch.cat(top_ids)


def _prepare_inputs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the inputs as a linear layer reads them: cast to the autocast dtype, if it is active.

    If gradients are disabled, the inputs are also detached. An autograd function sees whether an
    input requires a gradient, but not whether gradients are enabled.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(device))
    if torch.is_grad_enabled():
        return hidden, weight, bias
    return hidden.detach(), weight.detach(), None if bias is None else bias.detach()


def _slice_ids(ids: _Ids, index: slice) -> _Ids:
    head, token, samples = ids
    return head[index], token[index], None if samples is None else samples[index]


def _list_tensors(rows: Rows) -> list[Tensor]:
    return [values for values in vars(rows).values() if values is not None]


def _empty_rows(empty: Tensor, ids: _Ids) -> list[Tensor]:
    """Return the tensors of rows with N = 0. `empty`: an empty tensor that has their dtype."""
    head, _, samples = ids
    empty_columns = [
        empty.reshape(0, ids_of_kind.shape[1])
        for ids_of_kind in (head, samples)
        if ids_of_kind is not None
    ]
    return [empty_columns[0], empty, empty, *empty_columns[1:]]

"""One operator that runs any loss of rows straight from hidden states, without [N, V] logits.

A chunk of rows needs its logits once, in one buffer that turns in place into exp(z) and then into
the gradient (`chunk.py`), and three matrix products in all: gradients are made in the forward pass
and only scaled in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from student_trainer.losses.chunk import make_chunk
from student_trainer.losses.projection import HeadGradients, logit_chunks, wide_dtype
from student_trainer.losses.rows import Rows

# Already weighted losses [n] of the rows that stand at `index` of the batch.
LossFunction = Callable[[Rows, slice], Tensor]
# Head, token and sample ids: see fused_linear_loss.
_Ids = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class FusedLoss:
    """loss_sum, a scalar that can be differentiated; the rest is detached.

    rows: Rows of N; metrics, each [N]: "loss" as loss_fn gave it, "entropy" of the student in nats.
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
    chunk_rows: int | None = None,
) -> FusedLoss:
    """Sum of loss_fn over the rows of softmax((hidden @ weight.T + bias) / temperature).

    hidden [N, H]; weight [V, H]; head_ids [N, K] int64, distinct within a row; token_ids [N] int64;
    sample_ids [N, M] int64, the teacher's tail samples; bias [V]. Logits are handled `chunk_rows`
    at a time; what is made of them is float32 at least. For a loss whose weights are known only
    after all rows, see `fused_linear_rows`.
    """
    loss, losses, entropy, *rows = _FusedLinearLoss.apply(  # type: ignore[no-untyped-call]
        *_asked(hidden, weight, bias),
        (head_ids, token_ids, sample_ids),
        loss_fn,
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
        temperature: float,
        chunk_rows: int | None,
    ) -> tuple[Tensor, ...]:
        gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad)
        # Under mixed precision float32 weights meet bf16 states.
        weight = weight.to(hidden.dtype)
        none = hidden.new_zeros(0, dtype=wide_dtype(hidden))
        done: list[tuple[Tensor, ...]] = [(none, none, *_no_rows(none, ids))]
        for index, logits in logit_chunks(hidden, weight, bias, chunk_rows):
            chunk = make_chunk(logits, *_at(ids, index), temperature)
            if any(ctx.needs_input_grad):
                losses, of_rows = _derivatives(loss_fn, chunk.rows, index)
                gradients.add(index, chunk.gradient(of_rows), hidden, weight)
            else:
                losses = loss_fn(chunk.rows, index)
            done.append((losses, chunk.entropy, *_tensors(chunk.rows)))
        parts = [torch.cat(parts) for parts in zip(*done, strict=True)]
        # Not saved tensors: the one backward pass scales them in place, the weight's is large.
        ctx.gradients = gradients
        ctx.mark_non_differentiable(*parts)
        return parts[0].sum(), *parts

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: they would silently be zero
            raise RuntimeError("a fused loss has no second derivatives")
        if ctx.gradients is None:
            raise RuntimeError("a fused loss can be differentiated once: its gradients are used up")
        gradients, ctx.gradients = ctx.gradients, None
        return (*gradients.times(grad_loss), *[None] * 4)


def _derivatives(loss_fn: LossFunction, rows: Rows, index: slice) -> tuple[Tensor, Rows]:
    """Losses [n], and the derivatives of their sum in the rows, as rows."""
    with torch.enable_grad():
        leaves = rows.map(lambda values: values.detach().requires_grad_())
        losses = loss_fn(leaves, index)
        inputs = _tensors(leaves)
        found = torch.autograd.grad(losses.sum(), inputs, allow_unused=True)
    of_rows = [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(inputs, found, strict=True)
    ]
    return losses.detach(), Rows(*of_rows)


def fused_linear_rows(
    hidden: Tensor,
    weight: Tensor,
    head_ids: Tensor,
    token_ids: Tensor,
    *,
    sample_ids: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_rows: int | None = None,
) -> tuple[Rows, Tensor]:
    """(rows that can be differentiated, detached entropy [N]), without [N, V] logits either.

    For losses whose weights depend on all rows: a ratio of whole sequences, a whitened advantage.
    The backward pass makes the logits again: four matrix products, not three. Arguments as for
    `fused_linear_loss`.
    """
    entropy, *rows = _FusedLinearRows.apply(  # type: ignore[no-untyped-call]
        *_asked(hidden, weight, bias), (head_ids, token_ids, sample_ids), temperature, chunk_rows
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
        temperature: float,
        chunk_rows: int | None,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.ids, ctx.temperature, ctx.chunk_rows = ids, temperature, chunk_rows
        none = hidden.new_zeros(0, dtype=wide_dtype(hidden))
        done: list[tuple[Tensor, ...]] = [(none, *_no_rows(none, ids))]
        for index, logits in logit_chunks(hidden, weight.to(hidden.dtype), bias, chunk_rows):
            chunk = make_chunk(logits, *_at(ids, index), temperature)
            done.append((chunk.entropy, *_tensors(chunk.rows)))
        parts = tuple(torch.cat(parts) for parts in zip(*done, strict=True))
        ctx.mark_non_differentiable(parts[0])
        return parts

    @staticmethod
    def backward(ctx: Any, _: Tensor, *of_rows: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad)
        weight = weight.to(hidden.dtype)
        for index, logits in logit_chunks(hidden, weight, bias, ctx.chunk_rows):
            chunk = make_chunk(logits, *_at(ctx.ids, index), ctx.temperature)
            of_logits = chunk.gradient(Rows(*of_rows)[index])
            gradients.add(index, of_logits, hidden, weight)
        return (*gradients.times(None), *[None] * 3)


@torch.no_grad()
def fused_linear_top_ids(
    hidden: Tensor, weight: Tensor, top_k: int, *, bias: Tensor | None = None
) -> Tensor:
    """The `top_k` likeliest ids [N, top_k] of each row; [N, V] logits are never there at once."""
    hidden, weight, bias = _asked(hidden, weight, bias)
    found = [hidden.new_zeros(0, top_k, dtype=torch.long)]
    for _, logits in logit_chunks(hidden, weight.to(hidden.dtype), bias, None):
        found.append(logits.topk(top_k, dim=1).indices)
    return torch.cat(found)


def _asked(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As a linear layer takes them: in the dtype of autocast where it is on; and detached where
    nobody asks for gradients, as an autograd function is told only what its inputs could need.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(device))
    if torch.is_grad_enabled():
        return hidden, weight, bias
    return hidden.detach(), weight.detach(), None if bias is None else bias.detach()


def _at(ids: _Ids, index: slice) -> _Ids:
    head, token, samples = ids
    return head[index], token[index], None if samples is None else samples[index]


def _tensors(rows: Rows) -> list[Tensor]:
    return [values for values in vars(rows).values() if values is not None]


def _no_rows(none: Tensor, ids: _Ids) -> list[Tensor]:
    """The tensors of no rows at all; `none` is empty."""
    head, _, samples = ids
    wide = [none.reshape(0, of.shape[1]) for of in (head, samples) if of is not None]
    return [wide[0], none, none, *wide[1:]]

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
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_rows: int | None = None,
) -> FusedLoss:
    """Sum of loss_fn over the rows of softmax((hidden @ weight.T + bias) / temperature).

    hidden [N, H]; weight [V, H]; head_ids [N, K] int64, distinct within a row; token_ids [N] int64;
    bias [V]. Logits are handled `chunk_rows` at a time; what is made of them is float32 at least.
    For a loss whose weights are known only after all rows, see `fused_linear_rows`.
    """
    loss, head, tail, token, losses, entropy = _FusedLinearLoss.apply(  # type: ignore[no-untyped-call]
        *_asked(hidden, weight, bias), head_ids, token_ids, loss_fn, temperature, chunk_rows
    )
    return FusedLoss(loss, Rows(head, tail, token), {"loss": losses, "entropy": entropy})


class _FusedLinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head_ids: Tensor,
        token_ids: Tensor,
        loss_fn: LossFunction,
        temperature: float,
        chunk_rows: int | None,
    ) -> tuple[Tensor, ...]:
        gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad)
        # Under mixed precision float32 weights meet bf16 states.
        weight = weight.to(hidden.dtype)
        done: list[tuple[Tensor, ...]] = [_no_rows(hidden, head_ids)]
        for index, logits in logit_chunks(hidden, weight, bias, chunk_rows):
            chunk = make_chunk(logits, head_ids[index], token_ids[index], temperature)
            losses, *of_rows = _derivatives(loss_fn, chunk.rows, index)
            gradients.add(index, chunk.gradient(*of_rows), hidden, weight)
            done.append((*vars(chunk.rows).values(), losses, chunk.entropy))
        parts = [torch.cat(parts) for parts in zip(*done, strict=True)]
        # Not saved tensors: the one backward pass scales them in place, the weight's is large.
        ctx.gradients = gradients
        ctx.mark_non_differentiable(*parts)
        return parts[3].sum(), *parts

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("a fused loss can be differentiated once: its gradients are used up")
        gradients, ctx.gradients = ctx.gradients, None
        return (*gradients.times(grad_loss), *[None] * 5)


def _derivatives(loss_fn: LossFunction, rows: Rows, index: slice) -> list[Tensor]:
    """Losses [n], and the derivatives of their sum in the rows' head, tail and token."""
    with torch.enable_grad():
        leaves = [values.detach().requires_grad_() for values in vars(rows).values()]
        losses = loss_fn(Rows(*leaves), index)
        found = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
    of_rows = [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves, found, strict=True)
    ]
    return [losses.detach(), *of_rows]


def fused_linear_rows(
    hidden: Tensor,
    weight: Tensor,
    head_ids: Tensor,
    token_ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_rows: int | None = None,
) -> tuple[Rows, Tensor]:
    """(rows that can be differentiated, detached entropy [N]), without [N, V] logits either.

    For losses whose weights depend on all rows: a ratio of whole sequences, a whitened advantage.
    The backward pass makes the logits again: four matrix products, not three. Arguments as for
    `fused_linear_loss`.
    """
    *rows, entropy = _FusedLinearRows.apply(  # type: ignore[no-untyped-call]
        *_asked(hidden, weight, bias), head_ids, token_ids, temperature, chunk_rows
    )
    return Rows(*rows), entropy


class _FusedLinearRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head_ids: Tensor,
        token_ids: Tensor,
        temperature: float,
        chunk_rows: int | None,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden, weight, bias, head_ids, token_ids)
        ctx.temperature, ctx.chunk_rows = temperature, chunk_rows
        done = [_no_rows(hidden, head_ids)[:4]]
        for index, logits in logit_chunks(hidden, weight.to(hidden.dtype), bias, chunk_rows):
            chunk = make_chunk(logits, head_ids[index], token_ids[index], temperature)
            done.append((*vars(chunk.rows).values(), chunk.entropy))
        head, tail, token, entropy = (torch.cat(parts) for parts in zip(*done, strict=True))
        ctx.mark_non_differentiable(entropy)
        return head, tail, token, entropy

    @staticmethod
    def backward(
        ctx: Any, head: Tensor, tail: Tensor, token: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, head_ids, token_ids = ctx.saved_tensors
        gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad)
        weight = weight.to(hidden.dtype)
        for index, logits in logit_chunks(hidden, weight, bias, ctx.chunk_rows):
            chunk = make_chunk(logits, head_ids[index], token_ids[index], ctx.temperature)
            of_logits = chunk.gradient(head[index], tail[index], token[index])
            gradients.add(index, of_logits, hidden, weight)
        return (*gradients.times(None), *[None] * 4)


def _asked(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """An autograd function is told what its inputs could need, not that nobody asks."""
    if torch.is_grad_enabled():
        return hidden, weight, bias
    return hidden.detach(), weight.detach(), None if bias is None else bias.detach()


def _no_rows(hidden: Tensor, head_ids: Tensor) -> tuple[Tensor, ...]:
    """Head log-probs, tail, token, and two values a row more, of no row at all."""
    none = hidden.new_zeros(0, dtype=wide_dtype(hidden))
    return none.reshape(0, head_ids.shape[1]), none, none, none, none

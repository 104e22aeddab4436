"""One operator that runs any loss of rows straight from hidden states, without [N, V] logits.

Let a loss be a function of head log-probs l_i, token log-prob l_y and tail log-mass T, with
derivatives g_i, g_y, g_T and G their sum. Then (method: section 7)

    dL/dz_j = p_j ([j not in S] g_T / P_t - G) + [j in S] g_i + [j = y] g_y:

a row's scalar times the softmax, plus k + 1 scattered entries. So a chunk of rows needs its logits
once, in one buffer that turns in place into exp(z) and then into the gradient, and three matrix
products in all: gradients are made in the forward pass and only scaled in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from student_trainer.losses.rows import Rows

# Already weighted losses [n] of the rows that stand at `index` of the batch.
LossFunction = Callable[[Rows, slice], Tensor]

_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class FusedLoss:
    """loss_sum, a scalar that can be differentiated; rows and token_losses [N], detached."""

    loss_sum: Tensor
    rows: Rows
    token_losses: Tensor


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
    bias [V]. Logits are handled `chunk_rows` at a time in float32 (float64 for float64 input).
    """
    if chunk_rows is None:
        # Each chunk reads and writes the whole weight gradient: few rows would waste bandwidth.
        chunk_rows = max(1024 if hidden.is_cuda else 128, _CHUNK_BYTES // (4 * len(weight)))
    if not torch.is_grad_enabled():
        # An autograd function is told what its inputs could need, not that nobody asks.
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    loss, head, tail, token, losses = _FusedLinearLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, head_ids, token_ids, loss_fn, temperature, chunk_rows
    )
    return FusedLoss(loss, Rows(head, tail, token), losses)


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
        chunk_rows: int,
    ) -> tuple[Tensor, ...]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if of_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if of_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and of_bias else None
        # Under mixed precision float32 weights meet bf16 states; their gradient stays float32.
        narrow_weight = weight.to(hidden.dtype)
        buffer = hidden.new_empty(min(chunk_rows, len(hidden)), len(weight), dtype=wide)
        done: list[tuple[Tensor, ...]] = []
        for first in range(0, len(hidden), chunk_rows):
            index = slice(first, min(first + chunk_rows, len(hidden)))
            logits = _logits(hidden[index], narrow_weight, bias, temperature, buffer)
            rows, losses = _chunk(logits, head_ids[index], token_ids[index], loss_fn, index)
            done.append((rows.head_logprobs, rows.tail_logmass, rows.token_logprobs, losses))
            grad_logits = logits.div_(temperature)  # _chunk left the gradient in the buffer
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            narrow = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(narrow, narrow_weight, out=grad_hidden[index])
            if grad_weight is not None:
                _accumulate(grad_weight, narrow, hidden[index])
        head, tail, token, losses = (
            (torch.cat(parts) for parts in zip(*done, strict=True))
            if done
            else _nothing(hidden, head_ids, wide)
        )
        # Not saved tensors: the one backward pass scales them in place, the weight's is large.
        ctx.grads = grad_hidden, grad_weight, grad_bias
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(head, tail, token, losses)
        return losses.sum(), head, tail, token, losses

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("a fused loss can be differentiated once: its gradients are used up")
        grads, ctx.grads = ctx.grads, None
        scaled = (
            None if grad is None else grad.mul_(grad_loss).to(dtype)
            for grad, dtype in zip(grads, ctx.dtypes, strict=True)
        )
        return (*scaled, *[None] * 5)


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, buffer: Tensor
) -> Tensor:
    """(hidden @ weight.T + bias) / temperature in the first rows of `buffer`."""
    logits = buffer[: len(hidden)]
    if hidden.dtype == buffer.dtype:
        torch.mm(hidden, weight.T, out=logits)
    else:
        logits.copy_(hidden @ weight.T)
    if bias is not None:
        logits += bias
    return logits.div_(temperature)


def _chunk(
    logits: Tensor, head_ids: Tensor, token_ids: Tensor, loss_fn: LossFunction, index: slice
) -> tuple[Rows, Tensor]:
    """Rows and losses of one chunk; `logits` is overwritten by the loss's gradient in it."""
    head = logits.gather(1, head_ids)
    token = logits.gather(1, token_ids[:, None]).squeeze(1)
    buffer = logits.scatter_(1, head_ids, -torch.inf)
    # A head of everything leaves a maximum of -inf, which nothing can be subtracted from.
    top = buffer.amax(1).clamp(min=torch.finfo(buffer.dtype).min)
    tail_sum = buffer.sub_(top[:, None]).exp_().sum(1)
    # One common maximum, so that the probabilities below sum to one to the last bit.
    common = torch.maximum(top, head.amax(1)) if head.shape[1] else top
    head_mass, tail_mass = (head - common[:, None]).exp(), tail_sum * (top - common).exp()
    mass = head_mass.sum(1) + tail_mass
    total = common + mass.log()
    tail = top + tail_sum.log()

    with torch.enable_grad():
        leaves = [
            values.detach().requires_grad_()
            for values in (head - total[:, None], tail - total, token - total)
        ]
        losses = loss_fn(Rows(*leaves), index)
        grads = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
    g_head, g_tail, g_token = (
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves, grads, strict=True)
    )
    g_sum = g_head.sum(1) + g_tail + g_token
    scale = (g_tail - g_sum * tail_mass / mass) / torch.where(tail_sum == 0, 1, tail_sum)
    buffer.mul_(scale[:, None])
    buffer.scatter_(1, head_ids, g_head - head_mass * (g_sum / mass)[:, None])
    buffer.scatter_add_(1, token_ids[:, None], g_token[:, None])
    return Rows(*(leaf.detach() for leaf in leaves)), losses.detach()


def _accumulate(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    if total.dtype == hidden.dtype:
        total.addmm_(grad_logits.T, hidden)
    else:  # bf16 products, summed over chunks in float32
        total += grad_logits.T @ hidden


def _nothing(hidden: Tensor, head_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    none = hidden.new_zeros(0, dtype=dtype)
    return none.reshape(0, head_ids.shape[1]), none, none, none

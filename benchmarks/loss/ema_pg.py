"""EMA-PG's actor loss, reimplemented with the same passes over [N, V] in the same order.

The source is github.com/LunjunZhang/ema-pg at 19d2196 (arXiv 2602.04417). It contains two copies of
verl: `search/`, whose recipe trains with the top-k KL, and the newer `math/`. The functions are
`_forward_micro_batch_with_logits` and `update_policy` of `verl/workers/actor/dp_actor.py`,
`compute_memory_efficient_kl` of `verl/trainer/ppo/core_algos.py`; `logprobs_from_logits` and
`entropy_from_logits` of `verl/utils/torch_functional.py` as the verl of each copy has them.
One update of a micro-batch makes these passes over the vocabulary. The head ids come from an
earlier forward pass with its own `topk`, which is not counted here:

    forward   logits = hidden @ weight.T; logits.div_(temperature), whatever the temperature
              the entropy: `search` always, also at entropy_coeff = 0 as in its recipe; `math` only
              at another coefficient, so not here. Compiled by torch.compile, as there.
              log p(y): on CUDA flash-attn's cross-entropy kernel. Without it, `search` makes
              log_softmax and gathers, `math` a logsumexp of each row in a Python loop.
    nothing   logits at y, less log p(y): the logsumexp; logits at the head ids by indexing
    backward  a [N, V] gradient each of the indexing, of logits at y, of log p(y) and, in `search`,
              of the entropy (times zero); their sum; its division by the temperature;
              two matrix products

Not counted: the rest of the actor's step (rows only: the policy gradient on log p(y), masks).
On CUDA, compiled code with the same passes replaces flash-attn's kernel: one read, and in the
backward pass one read and one write, in place in `math`. It is used for half precision.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.loss.problem import MissingPackage, Problem
from student_trainer.losses import Rows, topk_kl

TEMPERATURE = 1.0
Tree = Literal["search", "math"]


def search_update(p: Problem) -> None:
    """The update of the `search` copy."""
    _compute_update(p, "search")


def math_update(p: Problem) -> None:
    """The update of the `math` copy."""
    _compute_update(p, "math")


def _compute_update(p: Problem, tree: Tree) -> None:
    logits = p.hidden @ p.weight.T
    logits.div_(TEMPERATURE)
    entropy = _compile(_entropy)(logits) if tree == "search" else None
    token = _log_prob(logits, p.token_ids, tree)
    total = logits.gather(1, p.token_ids[:, None]).squeeze(1) - token
    row = torch.arange(len(logits), device=logits.device)[:, None].expand_as(p.head_ids)
    head = logits[row.reshape(-1), p.head_ids.reshape(-1)].view_as(p.head_ids)
    # None of their losses uses the tail's mass.
    rows = Rows(head - total[:, None], torch.zeros_like(total), token)
    loss = topk_kl(rows, p.teacher, p.in_head, direction="reverse", tail="published").sum()
    if entropy is not None:
        loss = loss - entropy.sum() * 0.0
    loss.backward()


def _log_prob(logits: Tensor, labels: Tensor, tree: Tree) -> Tensor:
    if logits.dtype == torch.bfloat16:
        in_place = tree == "math"
        out: Tensor = _KernelLogProb.apply(logits, labels, in_place)  # type: ignore[no-untyped-call]
        return out
    if tree == "search":
        return logits.log_softmax(1).gather(1, labels[:, None]).squeeze(1)
    label = logits.gather(1, labels[:, None]).squeeze(1)
    return label - torch.stack([row.logsumexp(0) for row in logits])


class _KernelLogProb(torch.autograd.Function):
    """log p(y) with the same passes over memory as flash-attn's cross-entropy kernel."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, in_place: bool) -> Tensor:
        total = _compile(_logsumexp)(logits)
        ctx.save_for_backward(logits, labels, total)
        ctx.in_place = in_place
        return logits.gather(1, labels[:, None]).squeeze(1).float() - total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, total = ctx.saved_tensors
        out = logits if ctx.in_place else torch.empty_like(logits)
        _compile(_write_gradient)(out, logits, labels, total, grad)
        return out, None, None


def _logsumexp(logits: Tensor) -> Tensor:
    return logits.float().logsumexp(1)


def _write_gradient(
    out: Tensor, logits: Tensor, labels: Tensor, total: Tensor, grad: Tensor
) -> None:
    hit = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    p = (logits.float() - total[:, None]).exp()
    out.copy_((hit.float() - p) * grad[:, None])


def _entropy(logits: Tensor) -> Tensor:
    return logits.logsumexp(1) - (logits.softmax(1) * logits).sum(1)


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    if shutil.which("g++") is None:
        raise MissingPackage("torch.compile needs g++")
    return torch.compile(function, dynamic=True)

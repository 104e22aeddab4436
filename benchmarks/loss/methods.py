"""The compared losses: the fused loss, its lower bounds, and the methods of other projects.

Each is a function of a Problem and leaves gradients in `hidden.grad` and `weight.grad`. "TRL",
"Liger" and "torch's" run the code of those libraries (`pip install trl liger-kernel`). The other
peers are published formulas, implemented here in plain torch. TRL's KL over the whole vocabulary
needs the teacher's logits in the process, so its time and memory include their computation.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss.ema_pg import math_update, search_update
from benchmarks.loss.problem import MissingPackage, Problem
from student_trainer.losses import (
    LossFunction,
    Rows,
    fused_linear_loss,
    fused_linear_rows,
    rows_from_logits,
    topk_kl,
)
from student_trainer.losses.fused import chunk

Method = Callable[[Problem], None]


def unbiased_kl(p: Problem) -> LossFunction:
    """Return the KL with which the fused loss is measured: the trainer's default."""
    in_head = p.in_head

    def loss(rows: Rows, index: slice) -> Tensor:
        teacher, inside = p.teacher[index], in_head[index]
        return topk_kl(rows, teacher, inside, direction="reverse", tail="bucket+sampled")

    return loss


def fused(p: Problem) -> None:
    """The fused loss, as the trainer calls it."""
    out = fused_linear_loss(p.hidden, p.weight, p.head_ids, p.token_ids, unbiased_kl(p))
    out.loss_sum.backward()


def fused_recompute(p: Problem) -> None:
    """The fused loss for losses whose weights depend on all rows: four products, not three."""
    rows, _ = fused_linear_rows(p.hidden, p.weight, p.head_ids, p.token_ids)
    unbiased_kl(p)(rows, slice(None)).sum().backward()


def fused_without_triton(p: Problem) -> None:
    """The fused loss with its passes over the logits in plain torch instead of Triton."""
    with patch.object(chunk, "_TRITON", False):
        fused(p)


def plain(p: Problem) -> None:
    """The same loss on materialised logits: the reference for the gradients."""
    rows = rows_from_logits(p.hidden @ p.weight.T, p.head_ids, p.token_ids)
    unbiased_kl(p)(rows, slice(None)).sum().backward()


@torch.no_grad()
def three_products(p: Problem) -> None:
    """The three matrix products alone, without a loss: the lower bound."""
    grad_weight = torch.zeros_like(p.weight)
    grad_hidden = torch.empty_like(p.hidden)
    buffer = p.hidden.new_empty(p.chunk, len(p.weight))
    for first in range(0, len(p.hidden), p.chunk):
        part = p.hidden[first : first + p.chunk]
        logits = torch.mm(part, p.weight.T, out=buffer[: len(part)])
        torch.mm(logits, p.weight, out=grad_hidden[first : first + p.chunk])
        grad_weight.addmm_(logits.T, part)
    p.hidden.grad, p.weight.grad = grad_hidden, grad_weight


@torch.no_grad()
def three_large_products(p: Problem) -> None:
    """The three products unchunked, with [N, V] in memory: the speed of this machine's GEMM."""
    logits = p.hidden @ p.weight.T
    p.hidden.grad, p.weight.grad = logits @ p.weight, logits.T @ p.hidden


@torch.no_grad()
def chunked_cross_entropy(p: Problem) -> None:
    """Cross-entropy with its gradient in the forward pass: the cost of a fused SFT loss."""
    grad_weight = torch.zeros_like(p.weight)
    grad_hidden = torch.empty_like(p.hidden)
    buffer = p.hidden.new_empty(p.chunk, len(p.weight))
    for first in range(0, len(p.hidden), p.chunk):
        part, labels = p.hidden[first : first + p.chunk], p.token_ids[first : first + p.chunk]
        logits = torch.mm(part, p.weight.T, out=buffer[: len(part)])
        top = logits.amax(1, keepdim=True)
        total = logits.sub_(top).exp_().sum(1, keepdim=True)
        logits.div_(total)
        logits.scatter_add_(1, labels[:, None], logits.new_full((len(part), 1), -1))
        torch.mm(logits, p.weight, out=grad_hidden[first : first + p.chunk])
        grad_weight.addmm_(logits.T, part)
    p.hidden.grad, p.weight.grad = grad_hidden, grad_weight


def cross_entropy(p: Problem) -> None:
    """Cross-entropy on materialised logits."""
    F.cross_entropy(p.hidden @ p.weight.T, p.token_ids, reduction="sum").backward()


def torch_linear_cross_entropy(p: Problem) -> None:
    """torch's own chunked linear cross-entropy (labels only), with the same chunk size."""
    if not hasattr(F, "linear_cross_entropy"):
        raise MissingPackage("this torch has no linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=p.chunk)
    loss = F.linear_cross_entropy(p.hidden, p.weight, p.token_ids, reduction="sum", options=options)
    loss.backward()


def published_minimal(p: Problem) -> None:
    """EMA-PG's formula (arXiv 2602.04417, Algorithm 1) with only the operations that it needs.

    These are the logits, one logsumexp and gathers: cheaper than EMA-PG's code (see `ema_pg.py`).
    """
    logits = p.hidden @ p.weight.T
    total = logits.logsumexp(1).float()
    head = logits.gather(1, p.head_ids).float() - total[:, None]
    token = logits.gather(1, p.token_ids[:, None]).squeeze(1).float() - total
    rows = Rows(head, torch.zeros_like(total), token)
    topk_kl(rows, p.teacher, p.in_head, direction="reverse", tail="published").sum().backward()


def log_softmax_bucket(p: Problem) -> None:
    """TRL's server distillation as published: full log_softmax, gather, and one tail bucket."""
    logprobs = (p.hidden @ p.weight.T).log_softmax(1)
    head = logprobs.gather(1, p.head_ids).float()
    tail = torch.log1p(-head.exp().sum(1).clamp(max=1 - 1e-6))
    rows = Rows(head, tail, head[:, 0])
    topk_kl(rows, p.teacher, p.in_head, direction="reverse", tail="bucket").sum().backward()


def trl_full_vocabulary(p: Problem) -> None:
    """TRL's own code: generalised JSD at beta = 1 (reverse KL) over the whole vocabulary."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        from trl.experimental.gkd import GKDTrainer
    except ImportError as error:
        raise MissingPackage("trl is not installed") from error
    student = p.hidden @ p.weight.T
    with torch.no_grad():
        teacher = p.teacher_hidden @ p.weight.T
    GKDTrainer.generalized_jsd_loss(
        student[None], teacher[None], beta=1.0, reduction="sum"
    ).backward()


def trl_chunked(p: Problem) -> None:
    """TRL's own code: chunked exact reverse KL, from the teacher's states and head."""
    try:
        from trl.trainer.distillation_trainer import _chunked_divergence_loss
    except ImportError as error:
        raise MissingPackage("trl is not installed") from error
    mask = torch.ones(1, len(p.hidden))
    mean = _chunked_divergence_loss(
        p.hidden[None], p.teacher_hidden[None], p.weight, p.weight.detach(), mask, 1.0
    )[0]
    (mean * len(p.hidden)).backward()


def liger_cross_entropy(p: Problem) -> None:
    """Liger's own code: fused linear cross-entropy, labels only."""
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError as error:
        raise MissingPackage("liger-kernel is not installed") from error
    if not p.hidden.is_cuda:
        raise MissingPackage("liger-kernel needs CUDA")
    LigerFusedLinearCrossEntropyLoss(reduction="sum")(p.weight, p.hidden, p.token_ids).backward()


METHODS: dict[str, Method] = {
    "fused": fused,
    "fused, recompute": fused_recompute,
    "three products": three_products,
    "chunked cross-entropy": chunked_cross_entropy,
    "cross-entropy": cross_entropy,
    "torch's chunked linear cross-entropy": torch_linear_cross_entropy,
    "published formula, minimal": published_minimal,
    "published formula (EMA-PG math, re-implemented)": math_update,
    "published formula (EMA-PG search, re-implemented)": search_update,
    "log_softmax + bucket formula": log_softmax_bucket,
    "TRL, full vocabulary, and the teacher's logits": trl_full_vocabulary,
    "TRL, chunked exact KL, and the teacher's head": trl_chunked,
}

GPU_METHODS: dict[str, Method] = {
    "fused": fused,
    "fused, plain torch passes": fused_without_triton,
    "fused, recompute": fused_recompute,
    "three products": three_large_products,
    "three products, chunked": three_products,
    "cross-entropy": cross_entropy,
    "torch's chunked linear cross-entropy": torch_linear_cross_entropy,
    "Liger, cross-entropy": liger_cross_entropy,
    "published formula, minimal": published_minimal,
    "published formula (EMA-PG math, re-implemented)": math_update,
    "published formula (EMA-PG search, re-implemented)": search_update,
    "log_softmax + bucket formula": log_softmax_bucket,
}


def find_installed(
    methods: dict[str, Method], small: Problem
) -> tuple[dict[str, Method], dict[str, str]]:
    """Return the methods that can run here, warmed up, and why the others cannot."""
    available, missing = {}, {}
    for name, run in methods.items():
        try:
            run(small)
        except MissingPackage as reason:
            missing[name] = str(reason)
        else:
            available[name] = run
        small.clear()
    return available, missing

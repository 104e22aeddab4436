"""The losses that are compared: ours, what bounds it from below, and what others do.

Each is a function of a Problem that leaves gradients in `hidden.grad` and `weight.grad`. "TRL" runs
TRL's own code (install the `bench` extra); the other peers are their published formulas, written
here in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from student_trainer.losses import Rows, fused_linear_loss, rows_from_logits, topk_kl

CHUNK = 128


@dataclass(frozen=True)
class Problem:
    """N student states and a head of V tokens; the teacher's rows at K ids, and its own states."""

    hidden: Tensor
    weight: Tensor
    head_ids: Tensor
    token_ids: Tensor
    teacher: Rows
    teacher_hidden: Tensor

    @property
    def in_head(self) -> Tensor:
        return (self.head_ids == self.token_ids[:, None]).any(1)


def make_problem(n: int, vocab: int, width: int, k: int, seed: int = 0) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, weight = randn(n, width), randn(vocab, width) * (2 / width**0.5)
    teacher_hidden = hidden + 0.3 * randn(n, width)
    heads, rows, tokens = [], [], []
    for part in teacher_hidden.split(CHUNK):  # chunked: the problem itself must not need much
        logits = part @ weight.T
        heads.append(logits.topk(k).indices)
        tokens.append(torch.randint(vocab, (len(part),), generator=generator))
        rows.append(rows_from_logits(logits, heads[-1], tokens[-1]))
    teacher = Rows(*(torch.cat([vars(r)[name] for r in rows]) for name in vars(rows[0])))
    return Problem(
        hidden.requires_grad_(),
        weight.requires_grad_(),
        torch.cat(heads),
        torch.cat(tokens),
        teacher,
        teacher_hidden,
    )


def fused(p: Problem) -> None:
    """Ours: bucket+sampled through the fused operator."""
    in_head = p.in_head

    def loss(rows: Rows, index: slice) -> Tensor:
        teacher, inside = p.teacher[index], in_head[index]
        return topk_kl(rows, teacher, inside, direction="reverse", tail="bucket+sampled")

    fused_linear_loss(
        p.hidden, p.weight, p.head_ids, p.token_ids, loss, chunk_rows=CHUNK
    ).loss_sum.backward()


@torch.no_grad()
def three_products(p: Problem) -> None:
    """The matrix products alone: no loss, the bound from below."""
    grad_weight = torch.zeros_like(p.weight)
    grad_hidden = torch.empty_like(p.hidden)
    buffer = p.hidden.new_empty(CHUNK, len(p.weight))
    for first in range(0, len(p.hidden), CHUNK):
        part = p.hidden[first : first + CHUNK]
        logits = torch.mm(part, p.weight.T, out=buffer[: len(part)])
        torch.mm(logits, p.weight, out=grad_hidden[first : first + CHUNK])
        grad_weight.addmm_(logits.T, part)
    p.hidden.grad, p.weight.grad = grad_hidden, grad_weight


@torch.no_grad()
def chunked_cross_entropy(p: Problem) -> None:
    """Cross-entropy, gradient in the forward pass, one buffer: what a fused SFT loss costs."""
    grad_weight = torch.zeros_like(p.weight)
    grad_hidden = torch.empty_like(p.hidden)
    buffer = p.hidden.new_empty(CHUNK, len(p.weight))
    for first in range(0, len(p.hidden), CHUNK):
        part, labels = p.hidden[first : first + CHUNK], p.token_ids[first : first + CHUNK]
        logits = torch.mm(part, p.weight.T, out=buffer[: len(part)])
        top = logits.amax(1, keepdim=True)
        total = logits.sub_(top).exp_().sum(1, keepdim=True)
        logits.div_(total)
        logits.scatter_add_(1, labels[:, None], -torch.ones(len(part), 1))
        torch.mm(logits, p.weight, out=grad_hidden[first : first + CHUNK])
        grad_weight.addmm_(logits.T, part)
    p.hidden.grad, p.weight.grad = grad_hidden, grad_weight


def plain_cross_entropy(p: Problem) -> None:
    """Cross-entropy on materialised logits."""
    F.cross_entropy(p.hidden @ p.weight.T, p.token_ids, reduction="sum").backward()


def published(p: Problem) -> None:
    """EMA-PG's formula (arXiv 2602.04417, Algorithm 1) on materialised logits."""
    rows = rows_from_materialised(p.hidden @ p.weight.T, p)
    loss = topk_kl(rows, p.teacher, p.in_head, direction="reverse", tail="published")
    loss.sum().backward()


def rows_from_materialised(logits: Tensor, p: Problem) -> Rows:
    """As published: one logsumexp over the vocabulary, gathers, and no tail mass."""
    total = logits.logsumexp(1)
    head = logits.gather(1, p.head_ids) - total[:, None]
    token = logits.gather(1, p.token_ids[:, None]).squeeze(1) - total
    return Rows(head, torch.zeros_like(total), token)


def log_softmax_bucket(p: Problem) -> None:
    """TRL's server distillation as published: full log_softmax, gather, one tail bucket."""
    logprobs = (p.hidden @ p.weight.T).log_softmax(1)
    head = logprobs.gather(1, p.head_ids)
    tail = torch.log1p(-head.exp().sum(1).clamp(max=1 - 1e-6))
    rows = Rows(head, tail, head[:, 0])
    topk_kl(rows, p.teacher, p.in_head, direction="reverse", tail="bucket").sum().backward()


def trl_full_vocabulary(p: Problem) -> None:
    """TRL's own code: generalized JSD at beta = 1 (reverse KL) over the whole vocabulary."""
    from trl.experimental.gkd import GKDTrainer

    student = p.hidden @ p.weight.T
    with torch.no_grad():
        teacher = p.teacher_hidden @ p.weight.T
    GKDTrainer.generalized_jsd_loss(
        student[None], teacher[None], beta=1.0, reduction="sum"
    ).backward()


def trl_chunked(p: Problem) -> None:
    """TRL's own code: the chunked exact reverse KL, teacher's states and head in the process."""
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    mask = torch.ones(1, len(p.hidden))
    _chunked_divergence_loss(
        p.hidden[None], p.teacher_hidden[None], p.weight, p.weight.detach(), mask, 1.0
    )[0].backward()


METHODS: dict[str, Callable[[Problem], None]] = {
    "fused": fused,
    "three products": three_products,
    "chunked cross-entropy": chunked_cross_entropy,
    "cross-entropy": plain_cross_entropy,
    "published formula": published,
    "log_softmax + bucket formula": log_softmax_bucket,
    "TRL, full vocabulary": trl_full_vocabulary,
    "TRL, chunked exact KL": trl_chunked,
}

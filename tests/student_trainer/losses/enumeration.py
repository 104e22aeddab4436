"""Exact expectations over the sampled token, by summing over every token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from student_trainer.losses import Direction, Rows, Tail, rows_from_logits, topk_kl


@dataclass(frozen=True)
class Case:
    student: Tensor  # logits [V], a leaf
    teacher: Tensor
    behaviour: Tensor  # logits of the policy mu that samples
    head: Tensor  # ids [k]


def make_case(
    vocab: int, k: int, direction: Direction, *, on_policy: bool, seed: int = 0, scale: float = 1.5
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    student, teacher, noise = (
        torch.randn(vocab, dtype=torch.float64, generator=generator) * scale for _ in range(3)
    )
    behaviour = student.clone() if on_policy else student + 0.3 * noise
    chooser = behaviour if direction == "reverse" else teacher
    return Case(student.requires_grad_(), teacher, behaviour, chooser.topk(k).indices)


def rows_for_every_token(logits: Tensor, head: Tensor, temperature: float = 1.0) -> Rows:
    """Row y is the same distribution with y as its actual token; N = V."""
    vocab = len(logits)
    return rows_from_logits(
        logits.expand(vocab, vocab),
        head.expand(vocab, -1),
        torch.arange(vocab),
        temperature=temperature,
    )


def expected_topk_kl(
    case: Case, direction: Direction, tail: Tail, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(E_y[value], E_y[gradient in the student's logits]) with y drawn from mu."""
    student = rows_for_every_token(case.student, case.head, temperature)
    teacher = rows_for_every_token(case.teacher, case.head, temperature)
    mu = (case.behaviour / temperature).softmax(0)
    importance = (student.token_logprobs.exp() / mu).detach()
    in_head = torch.isin(torch.arange(len(mu)), case.head)
    values = topk_kl(
        student, teacher, in_head, direction=direction, tail=tail, importance=importance
    )
    return expectation(values, mu, case.student)


def expectation(values: Tensor, weights: Tensor, leaf: Tensor) -> tuple[Tensor, Tensor]:
    total = (values * weights.detach()).sum()
    (gradient,) = torch.autograd.grad(total, leaf, retain_graph=True)
    return total.detach(), gradient

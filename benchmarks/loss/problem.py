"""The input of every compared loss: student states, a head, and the teacher's rows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from student_trainer.losses import Rows, rows_from_logits

# Rows per chunk of logits, both for making a problem and for the chunked methods.
CPU_CHUNK, CUDA_CHUNK = 128, 1024


class MissingPackage(Exception):
    """A package that a compared method needs is not installed."""


@dataclass(frozen=True)
class Problem:
    """N student states [N, H] and a head [V, H], both with gradients, and the teacher's rows.

    `head_ids` [N, K] start with the likeliest. `teacher_hidden` [N, H] are the teacher's states.
    """

    hidden: Tensor
    weight: Tensor
    head_ids: Tensor
    token_ids: Tensor
    teacher: Rows
    teacher_hidden: Tensor

    @property
    def in_head(self) -> Tensor:
        return (self.head_ids == self.token_ids[:, None]).any(1)

    @property
    def chunk(self) -> int:
        return CUDA_CHUNK if self.hidden.is_cuda else CPU_CHUNK

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def gradient_bytes(self) -> int:
        grads = (self.hidden.grad, self.weight.grad)
        return sum(grad.nbytes for grad in grads if grad is not None)

    def with_head(self, k: int) -> Problem:
        """Return the same problem with only the k likeliest head ids; their mass joins the tail."""
        rows = self.teacher
        outside_logprobs = torch.cat([rows.head_logprobs[:, k:], rows.tail_logmass[:, None]], 1)
        narrow = Rows(rows.head_logprobs[:, :k], outside_logprobs.logsumexp(1), rows.token_logprobs)
        ids = self.head_ids[:, :k].contiguous()
        return dataclasses.replace(self, head_ids=ids, teacher=narrow)

    def double(self) -> Problem:
        """Return a copy in float64 with its own gradients."""
        return dataclasses.replace(
            self,
            hidden=self.hidden.detach().double().requires_grad_(),
            weight=self.weight.detach().double().requires_grad_(),
            teacher=self.teacher.map(torch.Tensor.double),
            teacher_hidden=self.teacher_hidden.double(),
        )


def make_problem(
    n: int,
    vocab: int,
    width: int,
    k: int,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Problem:
    """Make a random problem from a fixed seed; its logits have a standard deviation of 2."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    hidden, weight = randn(n, width), randn(vocab, width) * (2 / width**0.5)
    teacher_hidden = hidden + 0.3 * randn(n, width)
    heads, rows, tokens = [], [], []
    # In chunks, so that making the problem needs little memory.
    for part in teacher_hidden.split(CPU_CHUNK if device == "cpu" else CUDA_CHUNK):
        logits = (part @ weight.T).float()
        heads.append(logits.topk(k).indices)
        tokens.append(torch.randint(vocab, (len(part),), generator=generator, device=device))
        rows.append(rows_from_logits(logits, heads[-1], tokens[-1]))
    teacher = Rows(
        torch.cat([r.head_logprobs for r in rows]),
        torch.cat([r.tail_logmass for r in rows]),
        torch.cat([r.token_logprobs for r in rows]),
    )
    return Problem(
        hidden.requires_grad_(),
        weight.requires_grad_(),
        torch.cat(heads),
        torch.cat(tokens),
        teacher,
        teacher_hidden,
    )

"""One chunk of rows between the matrix products: logits to rows, and derivatives to d(logits).

Let a loss be a function of head log-probs l_i, token log-prob l_y (and those of other single ids,
alike) and tail log-mass T, with derivatives g_i, g_y, g_T and G their sum. Then (method: section
7), z the logits over temperature,

    dL/dz_j = p_j ([j not in S] g_T / P_t - G) + [j in S] g_i + [j = y] g_y:

a row's scalar times the softmax, plus k + 1 scattered entries.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from student_trainer.losses import softmax_torch
from student_trainer.losses.rows import Rows

_TRITON = importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class Chunk:
    """n rows whose logits are in a buffer [n, V] that is about to become their gradient.

    `rows` and `entropy` [n] in nats; the rest is what the gradient needs, [n], [n, K] or [n, M].
    """

    rows: Rows
    entropy: Tensor
    buffer: Tensor
    head_ids: Tensor
    token_ids: Tensor
    sample_ids: Tensor | None
    temperature: float
    top: Tensor
    token_ahead: Tensor
    head_share: Tensor
    tail_share: Tensor
    tail_sum: Tensor

    def gradient(self, of_rows: Rows) -> Tensor:
        """d(loss)/d(logits) [n, V], in the buffer, from the derivatives in the rows."""
        head, tail = of_rows.head_logprobs, of_rows.tail_logmass
        token, samples = of_rows.token_logprobs, of_rows.sample_logprobs
        everything = head.sum(1) + tail + _beside(token, samples).sum(1)
        scale = (tail - everything * self.tail_share) / torch.where(
            self.tail_sum == 0, 1, self.tail_sum
        )
        of_head = head - self.head_share * everything[:, None]
        # The token's whole entry is summed here: where the student is certain of it, it is a small
        # difference of large numbers, and a buffer of half precision would add them up to nothing.
        is_token = self.head_ids == self.token_ids[:, None]
        of_token = token + torch.where(
            is_token.any(1),
            torch.where(is_token, of_head, 0).sum(1),
            scale * self.token_ahead.exp(),
        )
        buffer: Tensor = _passes(self.buffer).scaled_exp_(
            self.buffer, self.top, scale / self.temperature, self.temperature
        )
        for ids, values in (self.head_ids, of_head), (self.token_ids[:, None], of_token[:, None]):
            buffer.scatter_(1, ids, (values / self.temperature).to(buffer.dtype))
        if samples is not None and self.sample_ids is not None:
            of_samples = (samples / self.temperature).to(buffer.dtype)
            buffer.scatter_add_(1, self.sample_ids, of_samples)
        return buffer


def make_chunk(
    buffer: Tensor,
    head_ids: Tensor,
    token_ids: Tensor,
    sample_ids: Tensor | None,
    temperature: float,
) -> Chunk:
    """The rows of softmax(buffer / temperature); `buffer` holds logits [n, V] and is used up."""
    wide = torch.float64 if buffer.dtype == torch.float64 else torch.float32
    head = buffer.gather(1, head_ids).to(wide) / temperature
    picked = buffer.gather(1, _beside(token_ids, sample_ids)).to(wide) / temperature
    buffer.scatter_(1, head_ids, -torch.inf)
    top, tail_sum, tail_weighted = _passes(buffer).tail_statistics(buffer, temperature)
    # One common maximum, so that the shares below sum to one to the last bit.
    common = torch.maximum(top, head.amax(1)) if head.shape[1] else top
    behind = (head - common[:, None]).clamp(min=-1e4)
    head_exp = behind.exp()
    # An empty tail's maximum is the lowest float: its distance times a mass of zero is zero.
    tail_behind = top - common
    tail_exp = tail_behind.exp()
    mass = head_exp.sum(1) + tail_sum * tail_exp
    total = common + mass.log()
    weighted = (behind * head_exp).sum(1) + tail_exp * (tail_weighted + tail_behind * tail_sum)
    logprobs = picked - total[:, None]
    samples = None if sample_ids is None else logprobs[:, 1:]
    return Chunk(
        rows=Rows(head - total[:, None], top + tail_sum.log() - total, logprobs[:, 0], samples),
        entropy=mass.log() - weighted / mass,
        buffer=buffer,
        head_ids=head_ids,
        token_ids=token_ids,
        sample_ids=sample_ids,
        temperature=temperature,
        top=top,
        token_ahead=picked[:, 0] - top,
        head_share=head_exp / mass[:, None],
        tail_share=tail_sum * tail_exp / mass,
        tail_sum=tail_sum,
    )


def _beside(token: Tensor, samples: Tensor | None) -> Tensor:
    """[n] and [n, M] as [n, 1 + M]: the ids whose log-probs are wanted, or what is due to them."""
    return token[:, None] if samples is None else torch.cat([token[:, None], samples], 1)


def reads_narrow(tensor: Tensor) -> bool:
    """Whether the passes over logits like `tensor` widen what they read: Triton's do, on CUDA."""
    return tensor.is_cuda and tensor.dtype != torch.float64 and _TRITON


def _passes(logits: Tensor) -> ModuleType:
    if not reads_narrow(logits):
        return softmax_torch
    from student_trainer.losses import softmax_triton

    return softmax_triton

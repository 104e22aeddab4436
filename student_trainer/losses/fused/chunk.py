"""Computes the rows of one chunk from the products of the head, and the gradient of the products.

The loss is a function of the head log-probs l_i, the tail log-mass T, the token log-prob l_y and
the log-probs of samples of the tail, which are treated like l_y. Let g_i, g_T and g_y be its
derivatives, and G their sum. Let z = f(x) be the logits divided by the temperature, where x are the
products of hidden states and weight, and f is a `LogitCurve`. S are the head ids, p_j is the
softmax of z, and P_t the tail mass. Then

    dL/dz_j = p_j ([j not in S] g_T / P_t - G) + [j in S] g_i + [j = y] g_y
    dL/dx_j = f'(x_j) dL/dz_j

So dL/dz is the softmax times one scalar per row, plus one entry for each head id, token and sample.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from student_trainer.losses.fused import softmax_torch
from student_trainer.losses.fused.logit_map import LogitCurve
from student_trainer.losses.rows import Rows, index_equal_ids

_TRITON = importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class Chunk:
    """n rows, and a buffer [n, V] that holds the products of the head for these rows.

    - rows: in nats.
    - entropy [n]: the entropy of the student, in nats.
    - buffer [n, V]: changed in place; `gradient` may overwrite it.

    The other tensors, [n], [n, K] or [n, M], are intermediate results for `gradient`.
    """

    rows: Rows
    entropy: Tensor
    buffer: Tensor
    head_ids: Tensor
    token_ids: Tensor
    sample_ids: Tensor | None
    curve: LogitCurve
    top: Tensor
    token_ahead: Tensor
    sample_ahead: Tensor
    sample_in_head: Tensor | None
    head_slope: Tensor | float
    picked_slope: Tensor | float
    head_share: Tensor
    tail_share: Tensor
    tail_sum: Tensor

    def gradient(self, row_gradients: Rows, dtype: torch.dtype) -> Tensor:
        """Return d(loss)/d(products) [n, V]; see the module docstring. Call this method only once.

        - row_gradients: the derivatives of the loss with respect to the rows.
        - dtype: the dtype of the matrix products that read the gradient.

        The Triton kernels write the gradient in `dtype`, which saves memory traffic. Without
        Triton, the gradient overwrites `buffer`.
        """
        head, tail = row_gradients.head_logprobs, row_gradients.tail_logmass
        token, samples = row_gradients.token_logprobs, row_gradients.sample_logprobs
        gradient_sum = head.sum(1) + tail + _prepend_token(token, samples).sum(1)
        scale = (tail - gradient_sum * self.tail_share) / torch.where(
            self.tail_sum == 0, 1, self.tail_sum
        )
        head_entries = head - self.head_share * gradient_sum[:, None]
        # Sum the terms of the token's entry here, in float32. If the student is certain of the
        # token, the entry is a small difference of large numbers, which half precision would lose.
        is_token = self.head_ids == self.token_ids[:, None]
        token_entries = token + torch.where(
            is_token.any(1),
            torch.where(is_token, head_entries, 0).sum(1),
            scale * self.token_ahead.exp(),
        )
        buffer = self.buffer
        if has_kernels(buffer) and buffer.dtype != dtype:
            buffer = torch.empty_like(buffer, dtype=dtype)
        _select_passes(self.buffer).scaled_exp(
            self.buffer, self.top, scale * self.curve.steepest, self.curve, buffer
        )
        token_slope, _ = self._slopes()
        for ids, values in (
            (self.head_ids, head_entries * self.head_slope),
            (self.token_ids[:, None], token_entries[:, None] * token_slope),
        ):
            buffer.scatter_(1, ids, values.to(buffer.dtype))
        if samples is not None:
            self._place_samples(buffer, samples, scale)
        return buffer

    def _place_samples(self, buffer: Tensor, samples: Tensor, scale: Tensor) -> None:
        """Add the derivatives of the samples, `samples` [n, M], to the gradient in `buffer`.

        An id may be sampled several times, and may equal the token. The values for one id are
        therefore summed in float32 before they are added.
        """
        assert self.sample_ids is not None
        assert self.sample_in_head is not None
        ids, sample_slot = self.sample_ids, index_equal_ids(self.sample_ids)
        total = (
            torch.zeros_like(samples).scatter_add_(1, sample_slot, samples).gather(1, sample_slot)
        )
        has_entry = self.sample_in_head | (ids == self.token_ids[:, None])
        _, slope = self._slopes()
        tail_entries = scale[:, None] * self.sample_ahead.exp() * slope
        previous_entries = torch.where(has_entry, buffer.gather(1, ids), tail_entries)
        buffer.scatter_(1, ids, (previous_entries + total * slope).to(buffer.dtype))

    def _slopes(self) -> tuple[Tensor | float, Tensor | float]:
        """Return the slope of the curve at the tokens, [n, 1], and at the samples, [n, M]."""
        slope = self.picked_slope
        return (slope, slope) if isinstance(slope, float) else (slope[:, :1], slope[:, 1:])


def make_chunk(
    buffer: Tensor,
    head_ids: Tensor,
    token_ids: Tensor,
    sample_ids: Tensor | None,
    curve: LogitCurve,
) -> Chunk:
    """Return the rows of softmax(curve(buffer)). The function overwrites `buffer`.

    - buffer [n, V]: the products of the head.
    - head_ids [n, K] int64: distinct within a row.
    - token_ids [n] int64.
    - sample_ids [n, M] int64, or None.

    The rows are float32, or float64 if the products are float64.
    """
    wide = torch.float64 if buffer.dtype == torch.float64 else torch.float32
    head = curve(buffer.gather(1, head_ids).to(wide))
    picked = curve(buffer.gather(1, _prepend_token(token_ids, sample_ids)).to(wide))
    buffer.scatter_(1, head_ids, -torch.inf)
    in_head = None if sample_ids is None else buffer.gather(1, sample_ids) == -torch.inf
    top, tail_sum, tail_weighted = _select_passes(buffer).tail_statistics(buffer, curve)
    # One maximum for head and tail, so that the shares below sum to one to the last bit.
    common = torch.maximum(top, head.amax(1)) if head.shape[1] else top
    behind = (head - common[:, None]).clamp(min=-1e4)
    head_exp = behind.exp()
    # The maximum of an empty tail is finite (the lowest float), so times a mass of zero it is 0.
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
        curve=curve,
        top=top,
        token_ahead=picked[:, 0] - top,
        sample_ahead=picked[:, 1:] - top[:, None],
        sample_in_head=in_head,
        head_slope=curve.slope(head),
        picked_slope=curve.slope(picked),
        head_share=head_exp / mass[:, None],
        tail_share=tail_sum * tail_exp / mass,
        tail_sum=tail_sum,
    )


def _prepend_token(token: Tensor, samples: Tensor | None) -> Tensor:
    """Concatenate [n] and [n, M] to [n, 1 + M]: first the column of the token, then the samples."""
    return token[:, None] if samples is None else torch.cat([token[:, None], samples], 1)


def has_kernels(tensor: Tensor) -> bool:
    """Return True if Triton kernels can compute the softmax passes over `tensor`.

    The kernels need Triton and a CUDA tensor that is not float64.
    """
    return tensor.is_cuda and tensor.dtype != torch.float64 and _TRITON


def _select_passes(logits: Tensor) -> ModuleType:
    if not has_kernels(logits):
        return softmax_torch
    from student_trainer.losses.fused import softmax_triton

    return softmax_triton

"""The exact KL over the whole vocabulary: the reference for all other losses.

Top-k KL with K = V equals it in every tail mode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from student_trainer.losses.rows import LOWEST_LOGPROB
from student_trainer.losses.topk import Direction


def exact_kl(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    direction: Direction,
    temperature: float = 1.0,
) -> Tensor:
    """Return KL(student || teacher) ("reverse") or KL(teacher || student) ("forward"), [N] in nats.

    Both logits [N, V] are divided by `temperature`. Log-probs below LOWEST_LOGPROB are clamped to
    it. The gradient flows through the student only.
    """
    log_p = _log_softmax(student_logits, temperature)
    log_q = _log_softmax(teacher_logits, temperature).detach()
    if direction == "reverse":
        return (log_p.exp() * (log_p - log_q)).sum(1)
    return (log_q.exp() * (log_q - log_p)).sum(1)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    scaled = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    return scaled.log_softmax(1).clamp(min=LOWEST_LOGPROB)

"""Messages between the vllm engine and vLLM's worker.

Requests are plain values and records are bytes. Shapes: L tokens sampled for a sequence; k head ids
and M draws per token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from student_trainer.data.sequence import TailDraws
from student_trainer.rollout_client.order import Order
from student_trainer.rollouts.sampler import SampledTokens

ADAPTERS = 1  # vLLM's number of the student's adapters, its only adapters


def request_fields(name: str, order: Order, index: int) -> dict[str, Any]:
    """Return the values that the worker needs for a sequence, to be sent with the vLLM request.

    - name: a unique name of the order in the worker.
    - index: the index of the sequence in the order.
    """
    settings, sequence = order.settings, order.sequences[index]
    return {
        "order": name,
        "index": index,
        "sequences": len(order.sequences),
        "longest": max(request.limit for request in order.sequences),
        "top_k": settings.top_k,
        "temperature": settings.temperature,
        "draws": 0 if settings.seed is None else settings.draws,
        "seed": settings.seed,
        "stream_tokens": settings.stream_tokens,
        "number": sequence.number,
        "used": sequence.used,
        "limit": sequence.limit,
        "vocab_size": settings.vocab_size,
    }


def record_type(top_k: int, draws: int) -> np.dtype[np.void]:
    """Return the numpy dtype of the record of one token."""
    return np.dtype(
        [
            ("token", "<i4"),
            ("logprob", "<f4"),
            ("version", "<i8"),
            ("head", "<i4", (top_k,)),
            ("draw", "<i4", (draws,)),
            ("draw_logprob", "<f4", (draws,)),
        ]
    )


def decode_records(
    data: bytes, *, top_k: int, draws: int, ended: bool, closed: bool
) -> SampledTokens:
    """Return the sampled tokens of a sequence. `data`: the bytes of its L records."""
    records = np.frombuffer(data, record_type(top_k, draws))
    starts = np.flatnonzero(np.diff(records["version"], prepend=-1))
    lengths = np.diff(starts, append=len(records))
    tail_draws = None
    if draws:
        tail_draws = TailDraws(
            torch.from_numpy(records["draw"].copy()),
            torch.from_numpy(records["draw_logprob"].copy()),
        )
    return SampledTokens(
        torch.from_numpy(records["token"].astype(np.int64)),
        torch.from_numpy(records["head"].copy()),
        torch.from_numpy(records["logprob"].copy()),
        ended,
        closed,
        tail_draws,
        tuple(zip(records["version"][starts].tolist(), lengths.tolist(), strict=True)),
    )

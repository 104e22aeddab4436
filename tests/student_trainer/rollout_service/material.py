"""Students on disk, snapshots of them, and orders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from student_trainer.checkpoints.export import write_weights
from student_trainer.rollout_client.order import (
    Order,
    SamplingSettings,
    SequenceRequest,
    WeightsVersion,
)
from student_trainer.rollout_client.snapshot import Probe, seal
from student_trainer.rollouts.sampler import SampledTokens
from tests.student_trainer import tiny

TOP_K, DRAWS = 4, 3


def student(number: int, **options: Any) -> Any:
    """Return the student of step `number`, with random weights by seed."""
    return tiny.model(seed=100 + number, spread=0.2, **options)


def probe_of(model: Any) -> Probe:
    token_ids = torch.tensor([[3, 5, 1, 7, 2, 6], [4, 4, 8, 1, 3, 9]])
    with torch.no_grad():
        logprobs = model(token_ids[:, :-1]).logits.log_softmax(-1)
    return Probe(token_ids, logprobs.gather(2, token_ids[:, 1:, None]).squeeze(2))


def snapshot(root: Path, number: int, model: Any = None, probe: Probe | None = None) -> Path:
    """Write a complete snapshot of version `number`, and return its directory."""
    directory = root / f"v{number}"
    directory.mkdir(parents=True)
    model = student(number) if model is None else model
    write_weights(directory, model, model.state_dict(keep_vars=True), torch.float32)
    seal(directory, number=number, dtype="float32", probe=probe or probe_of(model))
    return directory


def order(
    directory: Path,
    *,
    number: int = 1,
    lineage: str = "run.1",
    sequences: int = 8,
    limit: int = 12,
    batch_tokens: int = 60,
    first: int = 0,
    **settings: Any,
) -> Order:
    values: dict[str, Any] = {
        "top_k": TOP_K,
        "temperature": 2.0,
        "draws": DRAWS,
        "seed": 7,
        "stream_tokens": limit,
        "batch_tokens": batch_tokens,
    }
    requests = [
        SequenceRequest(torch.tensor([1 + n % 9, 2, 3 + n % 4][: 1 + n % 3]), first + n, limit)
        for n in range(sequences)
    ]
    version = WeightsVersion(lineage, number, directory)
    return Order(version, SamplingSettings(**{**values, **settings}), requests)


def tensors_of(sampled: SampledTokens) -> Sequence[Tensor]:
    tensors = [sampled.token_ids, sampled.head_ids, sampled.token_logprobs]
    if sampled.draws is not None:
        tensors += [sampled.draws.ids, sampled.draws.logprobs]
    return tensors


def assert_same(actual: SampledTokens, expected: SampledTokens) -> None:
    """Check that all but the versions is bit-identical."""
    pairs = zip(tensors_of(actual), tensors_of(expected), strict=True)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
    assert (actual.ended, actual.closed) == (expected.ended, expected.closed)

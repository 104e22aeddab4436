"""An order: sequences that a rollout engine samples with one version of the student's weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

InFlight = Literal["drain", "recompute", "keep"]


@dataclass(frozen=True)
class WeightsVersion:
    """A version of the student's weights, and the snapshot that contains it (`snapshot.py`).

    - lineage: an id; the versions of one lineage are ordered by number. Each attempt of a trainer
      has its own lineage.
    - number: the number of steps that the student had finished.
    - directory: the directory of the snapshot.
    - in_flight: how the engine treats running sequences of an older version of the lineage when it
      loads this version. "drain": the engine finishes the sequences first, so each sequence has one
      version. "recompute": the sequences continue with the new weights, and their KV cache is
      computed again. "keep": the sequences continue with the new weights and the KV cache of the
      older weights.
    - job, attempt: the trainer's run directory and the number of its attempt. A service that has
      received an order of a later attempt of the job refuses this version; "" disables the check.
    """

    lineage: str
    number: int
    directory: Path
    in_flight: InFlight = "drain"
    job: str = ""
    attempt: int = 0


@dataclass(frozen=True)
class SamplingSettings:
    """The settings that all sequences of an order share.

    - top_k: number of head ids to record per token, may be 0.
    - temperature: divides the logits.
    - draws: number of ids per token to draw from the tail; greedy sequences have none.
    - seed: fixes the random numbers together with a rollout number; None takes the most likely
      token each time.
    - stream_tokens: number of random numbers of a rollout, see `rollout_noise`.
    - batch_tokens: maximum tokens of a batch, including padding; the vllm engine ignores it.
    - marks: texts that end a sequence when they are sampled.
    - vocab_size: sample only from the first `vocab_size` ids; None: from all ids.
    - end_ids: tokens that end a sequence; empty: the end tokens of the model that the service
      loaded.
    """

    top_k: int
    temperature: float
    draws: int
    seed: int | None
    stream_tokens: int
    batch_tokens: int
    marks: tuple[str, ...] = ()
    vocab_size: int | None = None
    end_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class SequenceRequest:
    """A sequence to continue.

    - token_ids [T] int64 on the CPU, T >= 1.
    - number: the rollout number.
    - limit: maximum tokens to sample, at least 1.
    - used: number of random numbers that earlier turns of the rollout have used.
    """

    token_ids: Tensor
    number: int
    limit: int
    used: int = 0


@dataclass(frozen=True)
class Order:
    """Sequences to sample together, with one version of the weights."""

    weights: WeightsVersion
    settings: SamplingSettings
    sequences: Sequence[SequenceRequest]

"""What an engine is: a model that scores a batch of queries, and the facts about it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from clients.teacher.query import ScoreQuery
from protos.errors import DistillError
from protos.rows.codec import RowBlock


@dataclass(frozen=True)
class EngineInfo:
    """The facts GetInfo tells. `vocabulary` holds the tokens by id and may be shorter than
    `vocab_size`. `fingerprint` and `version` are another with every update of the weights.
    """

    model: str
    fingerprint: str
    tokenizer_fingerprint: str
    vocabulary: tuple[str, ...]
    vocab_size: int
    max_length: int
    dtype: str
    name: str
    batch_invariant: bool
    version: int = 0

    def after(self, update: WeightUpdate) -> EngineInfo:
        """The same engine with new weights: the same updates in the same order give the same
        fingerprint, in another life of the program too.
        """
        facts = {"before": self.fingerprint, "tau": update.tau, "pushed": update.digest}
        return replace(self, fingerprint=fingerprint_of(facts), version=self.version + 1)


@dataclass(frozen=True)
class TensorSpec:
    """`dtype` is float32, bfloat16 or float16."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, eq=False)
class WeightUpdate:
    """All parameters of a model, by name: a spec and its little-endian bytes (uint8 [n]), finite in
    the type that the engine serves. `tau` None: they replace the weights, else phi <- tau phi + (1
    - tau) theta.
    """

    tensors: Mapping[str, tuple[TensorSpec, NDArray[Any]]]
    tau: float | None
    digest: str


class Engine(Protocol):
    """Synchronous, called from one thread at a time."""

    @property
    def info(self) -> EngineInfo: ...

    def score(self, queries: Sequence[ScoreQuery]) -> list[RowBlock | DistillError]:
        """One answer a query, in order. The fault of one query is its answer; raising fails the
        batch.
        """
        ...


@runtime_checkable
class TakesWeights(Protocol):
    """An engine whose weights can be updated; called from the engine's thread."""

    def parameters(self) -> Mapping[str, TensorSpec]:
        """What an update must hold, in the types that the engine serves."""
        ...

    def update(self, update: WeightUpdate) -> None:
        """Apply it; `info` tells the new fingerprint and version from then on."""
        ...


def fingerprint_of(facts: Mapping[str, object]) -> str:
    """sha256 of the facts as canonical JSON."""
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()

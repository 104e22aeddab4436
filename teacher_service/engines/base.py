"""The interface of scoring engines, and the value types for their identity and weight updates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from clients.teacher.query import ScoreQuery
from protos.errors import DistillError
from protos.rows.codec import RowBlock
from teacher_service.models.adapters import Adapter


@dataclass(frozen=True)
class EngineLimits:
    """Limits of an engine; the default is an engine that computes every query.

    - max_top_k: maximum head ids of a row if the engine chooses the head.
    - max_chosen_ids: maximum head ids and draws of a row if the student chooses them; None: the
      vocabulary size.
    - any_temperature: False if the engine scores only at temperature 1.
    - tail_samples: True if the engine draws tail samples.
    - any_vocab_size: False if the rows always cover all ids of the engine.
    """

    max_top_k: int | None = None
    max_chosen_ids: int | None = None
    any_temperature: bool = True
    tail_samples: bool = True
    any_vocab_size: bool = True


@dataclass(frozen=True)
class ScoringEngineInfo:
    """Identity and limits of an engine; most fields are the reply to GetInfo.

    - vocabulary: `vocabulary[i]` is the token with id i ("" for an unused id). The list may be
      shorter than `vocab_size`, the width of the logits.
    - max_length: in tokens.
    - fingerprint, version: both change with every weight update.
    - batch_invariant: True if the rows of a sequence do not depend on the other sequences in its
      batch.
    - adapters: the fingerprint of the rows with each adapter, by the adapter's name.
    - placeholder: the token that represents an image; None if the model does not read images.
      Otherwise, the engine is an ImageEngine.
    - chat_template: the default template of the tokenizer; "" if there is none, None if unknown.
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
    limits: EngineLimits = EngineLimits()
    adapters: Mapping[str, str] = field(default_factory=dict)
    placeholder: int | None = None
    chat_template: str | None = None

    def fingerprint_for(self, adapter: str) -> str:
        """Return the fingerprint of the rows with an adapter; "" means without an adapter."""
        return self.adapters[adapter] if adapter else self.fingerprint

    def with_update(self, update: WeightUpdate) -> ScoringEngineInfo:
        """Return the info after `update`: version + 1 and a new fingerprint.

        The new fingerprint depends only on the old fingerprint and on `update`. The same updates in
        the same order produce the same fingerprint, also after a restart of the program.
        """
        facts = {"before": self.fingerprint, "tau": update.tau, "pushed": update.digest}
        return replace(self, fingerprint=compute_fingerprint(facts), version=self.version + 1)


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one parameter. `dtype` is float32, bfloat16 or float16."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, eq=False)
class WeightUpdate:
    """A validated update of all parameters of a model.

    - tensors: maps each parameter name to its spec and its little-endian bytes, uint8 [n]. Every
      value is finite in the dtype that the engine serves.
    - tau: None means that the tensors replace the weights. Otherwise the update is an EMA: phi <-
      tau phi + (1 - tau) theta, where phi is the served parameter and theta the pushed tensor.
    - digest: the xxh3-128 hex digest of the names, specs and bytes.
    """

    tensors: Mapping[str, tuple[TensorSpec, NDArray[Any]]]
    tau: float | None
    digest: str


class ScoringEngine(Protocol):
    """A model that scores batches of queries.

    Calls are synchronous. Engines are not thread-safe: callers use one thread at a time.
    """

    @property
    def info(self) -> ScoringEngineInfo:
        """Identity of the engine with its current weights."""
        ...

    def score(self, queries: Sequence[ScoreQuery]) -> list[RowBlock | DistillError]:
        """Return one result for each query, in order.

        An error that concerns one query is returned in its place. An exception means that the
        whole batch failed.
        """
        ...


@dataclass(frozen=True)
class QuerySchedule:
    """The order of one query, and the step size that it sets for the engine.

    - number: the engine starts the waiting query with the lowest number next.
    - step_tokens: maximum number of tokens of a step, until another query sets another maximum; 0
      means the engine's limit.
    - single: True if the sender has no other query in flight.
    """

    number: int = 0
    step_tokens: int = 0
    single: bool = False


@runtime_checkable
class ContinuousEngine(ScoringEngine, Protocol):
    """An engine that batches queries by itself, and accepts queries while it computes others."""

    @property
    def step_tokens(self) -> int:
        """Maximum number of tokens of one step of the engine."""
        ...

    async def score_one(self, query: ScoreQuery, schedule: QuerySchedule) -> RowBlock:
        """Return the rows of a query. Many calls may run at the same time, in one event loop.

        Cancelling the call takes the query out of the engine. Raises a DistillError if the query is
        at fault. Any other exception means that the engine has failed.
        """
        ...


@runtime_checkable
class RemoteEngine(Protocol):
    """An engine whose rows come from a third-party server, which may charge for them."""

    @property
    def requested_tokens(self) -> int:
        """Number of tokens in all requests to the server since the start of the engine."""
        ...


@runtime_checkable
class UpdatableEngine(Protocol):
    """An engine that accepts weight updates.

    Call `update` on the thread that calls `score`, so that no batch is in progress.
    """

    def parameters(self) -> Mapping[str, TensorSpec]:
        """Return the parameters that an update must contain, with the dtypes that are served."""
        ...

    def update(self, update: WeightUpdate) -> None:
        """Apply `update`. Afterwards `info` has the new fingerprint and version."""
        ...


def with_adapters(info: ScoringEngineInfo, adapters: Sequence[Adapter]) -> ScoringEngineInfo:
    """Return the info of an engine that also scores with `adapters`.

    The fingerprint without an adapter is unchanged, so that adapters can be added to a teacher.
    """
    facts = {
        adapter.name: {"model": info.fingerprint, "adapter": adapter.digest} for adapter in adapters
    }
    return replace(
        info,
        adapters={
            name: compute_fingerprint(adapter_facts) for name, adapter_facts in facts.items()
        },
    )


@runtime_checkable
class ImageEngine(Protocol):
    """An engine whose model reads images."""

    def expand_images(self, query: ScoreQuery) -> ScoreQuery:
        """Return a query with images in the form that `score` accepts: with all image tokens.

        Any thread may call this method. Raises InvalidInput if an image cannot be used, or if the
        sequence becomes too long.
        """
        ...


def compute_fingerprint(facts: Mapping[str, object]) -> str:
    """Return the sha256 hex digest of `facts` as canonical JSON (sorted keys, no spaces)."""
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()

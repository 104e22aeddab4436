"""What an engine is: a model that scores a batch of queries, and the facts about it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from clients.score_query import ScoreQuery
from protos.errors import DistillError
from protos.rows import RowBlock


@dataclass(frozen=True)
class EngineInfo:
    """The facts GetInfo tells. `vocabulary` holds the tokens by id and may be shorter than
    `vocab_size`.
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


class Engine(Protocol):
    """Synchronous, called from one thread at a time."""

    @property
    def info(self) -> EngineInfo: ...

    def score(self, queries: Sequence[ScoreQuery]) -> list[RowBlock | DistillError]:
        """One answer a query, in order. The fault of one query is its answer; raising fails the
        batch.
        """
        ...


def fingerprint_of(facts: Mapping[str, object]) -> str:
    """sha256 of the facts as canonical JSON."""
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()

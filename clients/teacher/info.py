"""What a teacher says of itself; see teacher.proto."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protos import teacher_pb2


@dataclass(frozen=True)
class TeacherInfo:
    """What it is."""

    model: str
    fingerprint: str
    version: int
    tokenizer_fingerprint: str
    vocab_size: int
    max_top_k: int
    max_length: int
    dtype: str
    engine: str
    batch_invariant: bool
    max_tail_samples: int


@dataclass(frozen=True)
class TeacherLoad:
    """What it does, and did since its start; `cache_tiers` has (hits, misses) by tier."""

    queued_tokens: int
    active_streams: int
    scored_tokens: int
    forwards: int
    cancelled: int
    cache_tiers: Mapping[str, tuple[int, int]]


def info_of(message: teacher_pb2.TeacherInfo) -> TeacherInfo:
    return TeacherInfo(
        model=message.model,
        fingerprint=message.fingerprint,
        version=message.version,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        vocab_size=message.vocab_size,
        max_top_k=message.max_top_k,
        max_length=message.max_length,
        dtype=message.dtype,
        engine=message.engine,
        batch_invariant=message.batch_invariant,
        max_tail_samples=message.max_tail_samples,
    )


def load_of(message: teacher_pb2.TeacherInfo) -> TeacherLoad:
    load = message.load
    return TeacherLoad(
        queued_tokens=load.queued_tokens,
        active_streams=load.active_streams,
        scored_tokens=load.scored_tokens,
        forwards=load.forwards,
        cancelled=load.cancelled,
        cache_tiers={tier.name: (tier.hits, tier.misses) for tier in load.cache_tiers},
    )

"""The description and the load of a teacher, as dataclasses. See also protos/teacher.proto."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protos import teacher_pb2
from protos.rpc.transport import MAX_MESSAGE_BYTES


@dataclass(frozen=True)
class TeacherInfo:
    """A teacher's model, identity and limits."""

    model: str
    """Directory or hub id of the model."""
    fingerprint: str
    """sha256 of everything that determines the rows: weights, config, dtype, engine."""
    version: int
    """Number of weight updates since the start; 0 if the weights never changed."""
    tokenizer_fingerprint: str
    """Result of `clients.teacher.query.tokenizer_fingerprint` for the teacher's vocabulary."""
    vocab_size: int
    """Number of logits per position."""
    max_top_k: int
    """Largest `top_k` of a query."""
    max_length: int
    """Maximum number of tokens of a sequence."""
    dtype: str
    """Data type of the weights."""
    engine: str
    """Engine that computes the rows: hf, vllm, endpoint or fake."""
    batch_invariant: bool
    """True if the rows of a sequence do not depend on other sequences in the same batch."""
    max_tail_samples: int
    """Largest `tail_samples` of a query."""
    max_tail_draws: int = 0
    """Maximum `draw_ids` per row; 0 for a teacher of an older version."""
    max_request_bytes: int = MAX_MESSAGE_BYTES
    """Maximum size of a request in bytes, in one message or several."""
    max_chosen_ids: int | None = None
    """Maximum `head_ids` and `draw_ids` per row together; None: no limit; 0: only `top_k`."""
    only_temperature_one: bool = False
    """True if the teacher scores at temperature 1 only."""
    takes_vocab_size: bool = False
    """Whether the teacher supports `vocab_size` of a query. Older versions and endpoints do not."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """For each adapter, by its name, the fingerprint of the rows with this adapter."""
    takes_images: bool = False
    """Whether the teacher's model accepts `images` of a query."""
    chat_template: str | None = None
    """Default chat template of the tokenizer; "" if it has none; None if unknown."""


@dataclass(frozen=True)
class TeacherLoad:
    """The present load of a teacher, and its counters since its start."""

    queued_tokens: int
    """Number of tokens in requests that wait for the model."""
    active_streams: int
    """Number of open streams of the method Score."""
    scored_tokens: int
    """Number of rows that the model has computed, without rows from the cache."""
    forwards: int
    """Number of forward passes of the model."""
    cancelled: int
    """Number of requests that their clients have cancelled."""
    cache_tiers: Mapping[str, tuple[int, int]]
    """Numbers of hits and misses, by the name of the cache tier."""


def info_of(message: teacher_pb2.TeacherInfo) -> TeacherInfo:
    """Convert the answer of GetInfo to a TeacherInfo."""
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
        max_tail_draws=message.max_tail_draws,
        max_request_bytes=message.max_request_bytes or MAX_MESSAGE_BYTES,
        max_chosen_ids=message.max_chosen_ids if message.HasField("max_chosen_ids") else None,
        only_temperature_one=message.only_temperature_one,
        takes_vocab_size=message.takes_vocab_size,
        adapters={adapter.name: adapter.fingerprint for adapter in message.adapters},
        takes_images=message.takes_images,
        chat_template=message.chat_template if message.HasField("chat_template") else None,
    )


def load_of(message: teacher_pb2.TeacherInfo) -> TeacherLoad:
    """Convert the answer of GetInfo to a TeacherLoad."""
    load = message.load
    return TeacherLoad(
        queued_tokens=load.queued_tokens,
        active_streams=load.active_streams,
        scored_tokens=load.scored_tokens,
        forwards=load.forwards,
        cancelled=load.cancelled,
        cache_tiers={tier.name: (tier.hits, tier.misses) for tier in load.cache_tiers},
    )

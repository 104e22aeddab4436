"""The fake engine: rows from a hash of the prefix, for tests and load tests.

It needs no model and does not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from clients.teacher.query import ScoreQuery, tokenizer_fingerprint
from protos.errors import Corrupt, DistillError, InvalidInput
from protos.rows.codec import RowBlock, concatenate
from teacher_service.engines.base import ScoringEngineInfo, compute_fingerprint
from teacher_service.head.uniforms import splitmix64, uniforms_of

_CHUNK_ROWS = 256
_MINIMUM_VALUES = {"vocab": 1, "seed": 0, "max_length": 2, "latency_ms": 0}


@dataclass(frozen=True)
class FakeSettings:
    """Settings of the fake engine, as in `--engine fake --model vocab=512,latency_ms=20`.

    - latency_ms: sleep before each batch, in ms.
    - max_length: maximum number of tokens of a sequence.
    - nan_token: logits of positions after this token are NaN; -1: no such token.
    - crash_token: a batch with this token raises RuntimeError; -1: no such token.
    - raise_after: number of batches after which every batch raises RuntimeError; -1: never. The
      self-test scores three batches.
    """

    vocab: int = 512
    seed: int = 0
    max_length: int = 8192
    latency_ms: int = 0
    nan_token: int = -1
    crash_token: int = -1
    raise_after: int = -1


def parse_settings(text: str) -> FakeSettings:
    """Parse comma-separated `name=integer` pairs.

    Raises InvalidInput if a name is unknown, a value is not an integer, or a value is too small.
    """
    setting_names = {field.name for field in fields(FakeSettings)}
    values: dict[str, int] = {}
    for pair in filter(None, text.split(",")):
        name, _, value = pair.partition("=")
        if name not in setting_names or not value.lstrip("-").isdigit():
            raise InvalidInput(
                f"{pair!r} is not a setting of the fake engine",
                field="--model",
                hint=f"write name=integer pairs; the names are {', '.join(sorted(setting_names))}",
            )
        values[name] = int(value)
        if name in _MINIMUM_VALUES and values[name] < _MINIMUM_VALUES[name]:
            raise InvalidInput(
                f"{name} must be at least {_MINIMUM_VALUES[name]}, got {values[name]}",
                field="--model",
            )
    return FakeSettings(**values)


class FakeEngine:
    """A deterministic, batch-invariant engine without a model.

    A row depends only on its prefix, the seed and the vocabulary size.
    """

    def __init__(self, settings: FakeSettings) -> None:
        tokens = tuple(f"t{i}" for i in range(settings.vocab))
        self._settings = settings
        self._calls = 0
        # Latency and failures do not change the rows, so they are not part of the fingerprint.
        facts = {"engine": "fake", **asdict(settings), "latency_ms": 0}
        del facts["raise_after"]
        self.info = ScoringEngineInfo(
            model="fake",
            fingerprint=compute_fingerprint(facts),
            tokenizer_fingerprint=tokenizer_fingerprint(tokens),
            vocabulary=tokens,
            vocab_size=settings.vocab,
            max_length=settings.max_length,
            dtype="float64",
            name="fake",
            batch_invariant=True,
        )

    def score(self, queries: Sequence[ScoreQuery]) -> list[RowBlock | DistillError]:
        """Score the batch after the configured latency.

        A query whose logits are NaN gets Corrupt. Raises RuntimeError if any query contains
        `crash_token`, and for every batch after the first `raise_after` batches.
        """
        time.sleep(self._settings.latency_ms / 1000)
        self._calls += 1
        if 0 <= self._settings.raise_after < self._calls:
            raise RuntimeError("the fake engine is set to fail every batch")
        if any(self._settings.crash_token in query.token_ids for query in queries):
            raise RuntimeError("the fake engine is set to crash on a token of this batch")
        return [self._score_one(query) for query in queries]

    def _score_one(self, query: ScoreQuery) -> RowBlock | DistillError:
        blocks = []
        uniforms = uniforms_of(query)
        for first in range(query.start, len(query.token_ids), _CHUNK_ROWS):
            last = min(first + _CHUNK_ROWS, len(query.token_ids))
            logits = self._compute_logits(query.token_ids, first, last) / query.temperature
            logits = logits[:, : query.vocab_size]
            invalid_rows = np.flatnonzero(np.isnan(logits).any(axis=1))
            if invalid_rows.size:
                position = first + int(invalid_rows[0])
                return Corrupt(f"the teacher's logits for position {position} are not finite")
            heads = None
            if query.head_ids is not None:
                heads = query.head_ids[first - query.start : last - query.start]
            draws = None
            if query.draw_ids is not None:
                draws = query.draw_ids[first - query.start : last - query.start]
            row_uniforms = uniforms[first - query.start : last - query.start]
            blocks.append(
                _compute_rows(
                    logits, heads, query.k, query.token_ids[first:last], row_uniforms, draws
                )
            )
        return concatenate(blocks)

    def _compute_logits(
        self, token_ids: NDArray[np.int32], first: int, last: int
    ) -> NDArray[np.float64]:
        """Return logits [last - first, V], uniform in [0, 16): a hash of (seed, prefix, id)."""
        hasher = xxhash.xxh3_64(seed=self._settings.seed)
        hasher.update(token_ids[: first - 1].astype("<i4").tobytes())
        prefixes = np.empty(last - first, dtype=np.uint64)
        for row, token in enumerate(token_ids[first - 1 : last - 1].astype("<i4")):
            hasher.update(token.tobytes())
            prefixes[row] = hasher.intdigest()
        ids = np.arange(self._settings.vocab, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        hashes = splitmix64(prefixes[:, None] + ids[None, :])
        logits = (hashes >> np.uint64(11)).astype(np.float64) * (16 / 2**53)
        follows_nan_token = (
            np.cumsum(token_ids == self._settings.nan_token)[first - 1 : last - 1] > 0
        )
        logits[follows_nan_token] = np.nan
        return logits


def _compute_rows(
    logits: NDArray[np.float64],
    heads: NDArray[np.int32] | None,
    k: int,
    token_ids: NDArray[np.int32],
    uniforms: NDArray[np.float64],
    draws: NDArray[np.int32] | None,
) -> RowBlock:
    if heads is None:
        heads = np.argsort(-logits, axis=1, kind="stable")[:, :k].astype(np.int32)
    logprobs = logits - _logsumexp(logits)[:, None]
    head_logprobs = np.take_along_axis(logprobs, heads, axis=1)
    token_logprobs = np.take_along_axis(logprobs, token_ids[:, None], axis=1)[:, 0]
    draw_logprobs = None if draws is None else np.take_along_axis(logprobs, draws, axis=1)
    np.put_along_axis(logprobs, heads, -np.inf, axis=1)
    tail_logmass = _logsumexp(logprobs)
    rows = RowBlock(
        heads,
        head_logprobs.astype(np.float32),
        tail_logmass.astype(np.float32),
        token_logprobs.astype(np.float32),
    )
    if draw_logprobs is not None:
        rows = replace(rows, draw_logprobs=draw_logprobs.astype(np.float32))
    if not uniforms.shape[1]:
        return rows
    sample_ids = _draw_samples(np.exp(logprobs), uniforms)
    sample_logprob = (
        np.take_along_axis(logprobs, sample_ids, axis=1).mean(axis=1).astype(np.float32)
    )
    return replace(rows, tail_sample_ids=sample_ids, tail_sample_logprob=sample_logprob)


def _draw_samples(weights: NDArray[np.float64], uniforms: NDArray[np.float64]) -> NDArray[np.int32]:
    """Return the same ids as `tail_samples.draw`, computed with numpy instead of torch."""
    cumulative_weights = weights.cumsum(axis=1)
    levels = np.minimum(
        uniforms * cumulative_weights[:, -1:], np.nextafter(cumulative_weights[:, -1:], 0)
    )
    positions = [
        row.searchsorted(level, side="right")
        for row, level in zip(cumulative_weights, levels, strict=True)
    ]
    return np.stack(positions).clip(max=weights.shape[1] - 1).astype(np.int32)


def _logsumexp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    top = x.max(axis=1)
    shift = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(shift + np.log(np.exp(x - shift[:, None]).sum(axis=1)))

"""ScoreQuery: a sequence and its requested rows.

Also its message to a teacher, and its cache key.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from clients.data.images import digest_of
from protos import teacher_pb2
from protos.errors import InvalidInput
from protos.rows import codec as rows
from protos.rpc.transport import MAX_CHUNK_BYTES, MAX_MESSAGE_BYTES

# Metadata key of a Score call: the identity of the teacher that the requests are meant for. A
# teacher with another identity refuses the call.
IDENTITY_KEY = "distill-teacher"
# Metadata of a Score call whose requests wait until no request of another call waits.
TURN_KEY, LAST_TURN = "distill-turn", "last"
# At a lower temperature, head log-probs leave the range of float16 (-65,504): the second id of a
# row would be -inf. At this temperature, logits may be 65 apart.
MIN_TEMPERATURE = 1e-3
# More samples are of no use: the standard deviation of a loss falls only with the square root of
# the number of samples.
MAX_TAIL_SAMPLES = 256
MAX_TAIL_DRAWS = 256
REQUEST_ENVELOPE_BYTES = 1024  # the other fields of a request


@dataclass(frozen=True, eq=False)
class ScoreQuery:
    """A request for the rows start..T-1 of a sequence. Row t is p(token t | tokens before t).

    - `token_ids`: int32 [T], the whole sequence
    - `start`: first scored position, from 1 to T - 1
    - `top_k`: number of head ids per row, if the teacher chooses them (its k most likely tokens)
    - `head_ids`: int32 [T - start, k], head ids that the student chose. Exactly one of `top_k` and
      `head_ids` must be given.
    - `temperature`: the divisor of the teacher's logits; at least MIN_TEMPERATURE
    - `f32`: True returns head log-probs as float32, False as float16
    - `tail_samples`: number of ids per row that the teacher samples, with replacement, from outside
      the head
    - `seed`: 0 <= seed < 2**64. The tail samples of a row depend only on the seed and on the tokens
      before the row.
    - `draw_ids`: int32 [T - start, M], ids that the student drew from its own tail. The teacher
      returns their log-probs. Not together with `tail_samples`.
    - `vocab_size`: the softmax is over the teacher's first `vocab_size` logits; None: over all
      logits
    - `adapter`: name of the teacher's adapter; "" means none
    - `images`: encoded images (PNG, JPEG or WebP), one for each placeholder token in `token_ids`.
      All placeholders are before `start`. An image is one token in `token_ids`, `start` and the
      rows, even if the model uses several tokens for it.

    Raises InvalidInput if these conditions do not hold for the arrays and the temperature.
    """

    token_ids: NDArray[np.int32]
    start: int
    top_k: int | None = None
    head_ids: NDArray[np.int32] | None = None
    temperature: float = 1.0
    f32: bool = False
    tail_samples: int = 0
    seed: int = 0
    draw_ids: NDArray[np.int32] | None = None
    vocab_size: int | None = None
    adapter: str = ""
    images: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if (self.top_k is None) == (self.head_ids is None):
            raise InvalidInput(
                "a query needs exactly one of top_k and head_ids",
                field="head_ids",
                hint="give top_k for the teacher's own head, head_ids for the student's",
            )
        if self.draw_ids is not None and self.tail_samples:
            raise InvalidInput(
                "a query cannot have both draw_ids and tail_samples",
                field="draw_ids",
                hint="remove one of the two",
            )
        if not MIN_TEMPERATURE <= self.temperature < math.inf:
            raise InvalidInput(
                f"must be finite and at least {MIN_TEMPERATURE}, got {self.temperature:g}",
                field="temperature",
                hint="use 1.0",
            )

        self._check_shapes()

    def _check_shapes(self) -> None:
        _require_integers("token_ids", self.token_ids, "[T]", 1)
        length = len(self.token_ids)
        if not 1 <= self.start < length:
            raise InvalidInput(
                f"must be 1 to {length - 1} for {length} tokens, got {self.start}",
                field="start",
                hint="row t scores token t given the tokens before it, so the first row is row 1",
            )
        for field, ids in (("head_ids", self.head_ids), ("draw_ids", self.draw_ids)):
            if ids is None:
                continue
            _require_integers(field, ids, "[T - start, n]", 2)
            if len(ids) != self.rows:
                raise InvalidInput(
                    f"has {len(ids)} rows, but {self.rows} tokens are scored ({length} tokens"
                    f" from {self.start} on)",
                    field=field,
                    hint="give [T - start, n] ids, one row for each scored token",
                )

    @property
    def rows(self) -> int:
        """Number of rows requested, T - start."""
        return len(self.token_ids) - self.start

    @property
    def k(self) -> int:
        """Number of head ids per row."""
        if self.head_ids is not None:
            return int(self.head_ids.shape[1])
        assert self.top_k is not None
        return self.top_k

    @property
    def tail_draws(self) -> int:
        """Number of `draw_ids` per row."""
        return 0 if self.draw_ids is None else int(self.draw_ids.shape[1])

    @property
    def nbytes(self) -> int:
        """Size in bytes of the arrays and images of the query."""
        id_arrays = (ids for ids in (self.head_ids, self.draw_ids) if ids is not None)
        id_bytes = self.token_ids.nbytes + sum(ids.nbytes for ids in id_arrays)
        return id_bytes + sum(map(len, self.images))

    @cached_property
    def image_digests(self) -> tuple[str, ...]:
        """The sha256 of each image, in hex."""
        return tuple(map(digest_of, self.images))


def _require_integers(field: str, ids: object, shape: str, dimensions: int) -> None:
    """Raise InvalidInput if `ids` is not an array of integers with this number of dimensions.

    `field`, `shape`: name and expected shape of the array, for the error.
    """
    if isinstance(ids, np.ndarray) and ids.ndim == dimensions and ids.dtype.kind in "iu":
        return
    description = (
        f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else type(ids).__name__
    )
    raise InvalidInput(
        f"must be an array of integers {shape}, got {description}",
        field=field,
        hint="use numpy.array(..., dtype=numpy.int32)",
    )


def answer_bytes(query: ScoreQuery) -> int:
    """Return the size in bytes of the rows of `query`, without head ids in the query."""
    logprob_bytes = 4 if query.f32 else 2
    candidate_bytes = (4 if query.head_ids is None else 0) + logprob_bytes
    sample_bytes = 4 * query.tail_samples + 4 if query.tail_samples else 0
    return query.rows * (
        query.k * candidate_bytes + query.tail_draws * logprob_bytes + sample_bytes + 8
    )


def request_of(
    query: ScoreQuery, request_id: str, next_position: int = 0
) -> teacher_pb2.ScoreRequest:
    """Return the message that requests the rows of `query`.

    `next_position`: position of the first requested row; 0 requests all rows.
    """
    f16, f32 = teacher_pb2.LOGPROB_FORMAT_F16, teacher_pb2.LOGPROB_FORMAT_F32
    request = teacher_pb2.ScoreRequest(
        request_id=request_id,
        token_ids=np.asarray(query.token_ids, dtype="<i4").tobytes(),
        start=query.start,
        temperature=query.temperature,
        logprob_format=f32 if query.f32 else f16,
        next_position=next_position,
        tail_samples=query.tail_samples,
        sample_seed=query.seed if query.tail_samples else 0,
        vocab_size=query.vocab_size or 0,
        adapter=query.adapter,
        images=b"".join(query.images),
        image_sizes=map(len, query.images),
    )
    if query.head_ids is not None:
        request.head_ids = np.asarray(query.head_ids, dtype="<i4").tobytes()
    else:
        request.top_k = query.k
    if query.draw_ids is not None:
        request.draw_ids = np.asarray(query.draw_ids, dtype="<i4").tobytes()
    return request


def requests_of(
    query: ScoreQuery, request_id: str, next_position: int = 0
) -> Iterator[teacher_pb2.ScoreRequest]:
    """Yield the message that `request_of` returns, or several messages if it is too large."""
    request = request_of(query, request_id, next_position)
    if request.ByteSize() <= MAX_MESSAGE_BYTES - REQUEST_ENVELOPE_BYTES:
        yield request
        return
    parts = [
        (name, getattr(request, name)[offset : offset + MAX_CHUNK_BYTES])
        for name in ("head_ids", "draw_ids", "images")
        for offset in range(0, len(getattr(request, name)), MAX_CHUNK_BYTES)
    ]
    request.ClearField("draw_ids")
    request.ClearField("images")
    if query.head_ids is not None:
        request.head_ids = b""  # the ids follow in parts
    request.more = True
    yield request
    for remaining_parts, (name, part) in zip(range(len(parts) - 1, -1, -1), parts, strict=True):
        yield teacher_pb2.ScoreRequest(
            request_id=request_id, more=remaining_parts > 0, **{name: part}
        )


def identity_of(fingerprint: str, version: int) -> str:
    """Return the text that identifies a teacher's weights in the metadata IDENTITY_KEY."""
    return f"{fingerprint} version {version}"


def row_key(fingerprint: str, version: int, query: ScoreQuery) -> bytes:
    """Return the 32-byte cache key of the rows that a teacher computes for `query`.

    The key is a sha256 of all values that determine the rows, including the version of the codec.
    `fingerprint`: the teacher's fingerprint for the adapter of the query. `version`: version of the
    teacher's weights.
    """
    facts = [
        fingerprint,
        version,
        len(query.token_ids),
        query.start,
        "top_k" if query.head_ids is None else "head_ids",
        query.k,
        # The message has a float32 temperature: round first, so that both ends compute one key.
        float(np.float32(query.temperature)).hex(),
        query.f32,
        rows.VERSION,
    ]
    if query.tail_samples:
        facts += [query.tail_samples, query.seed]
    if query.draw_ids is not None:
        facts += ["draw_ids", query.tail_draws]
    if query.vocab_size is not None:
        facts += ["vocab_size", query.vocab_size]
    if query.images:
        facts += ["images", query.image_digests]
    hasher = hashlib.sha256(json.dumps(facts).encode() + b"\n")
    hasher.update(np.asarray(query.token_ids, dtype="<i4").tobytes())
    if query.head_ids is not None:
        hasher.update(np.asarray(query.head_ids, dtype="<i4").tobytes())
    if query.draw_ids is not None:
        hasher.update(np.asarray(query.draw_ids, dtype="<i4").tobytes())
    return hasher.digest()


def tokenizer_fingerprint(tokens: Sequence[str]) -> str:
    """Return the sha256 of a vocabulary.

    `tokens`: the tokens in the order of their ids; "" for an unused id. Teacher and student both
    pass `clients.data.tokens.tokenizer.tokens_of(tokenizer)`. The length in bytes of each token is
    hashed, too.
    """
    hasher = hashlib.sha256()
    for token in tokens:
        data = token.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(4, "little") + data)
    return hasher.hexdigest()

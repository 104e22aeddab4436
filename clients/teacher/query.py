"""What is asked of a teacher: one sequence, the rows wanted of it, and the key its rows are stored
under.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protos import teacher_pb2
from protos.errors import InvalidInput
from protos.rows import codec as rows

# Metadata of a Score call: the teacher the requests are meant for. Another one refuses the call.
IDENTITY_KEY = "distill-teacher"
# Far beyond use: the spread of a loss falls with the root of their number.
MAX_TAIL_SAMPLES = 256


@dataclass(frozen=True, eq=False)
class ScoreQuery:
    """Rows start..T-1 of a sequence: row t is the distribution of token t given the tokens before
    it.

    token_ids int32 [T]; exactly one of top_k (the teacher's own head) and head_ids int32 [T -
    start, k] (ids chosen by the student). Logits are divided by `temperature`. `f32` asks for
    log-probs in full precision. `tail_samples`: ids that the teacher draws for each row from
    outside its head, the same ones for the same `seed` (0 <= seed < 2**64) and tokens before it.
    """

    token_ids: NDArray[np.int32]
    start: int
    top_k: int | None = None
    head_ids: NDArray[np.int32] | None = None
    temperature: float = 1.0
    f32: bool = False
    tail_samples: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.top_k is None) == (self.head_ids is None):
            raise InvalidInput(
                "a query has either top_k or head_ids",
                field="head_ids",
                hint="give top_k for the teacher's own head, head_ids for the student's",
            )

    @property
    def rows(self) -> int:
        return len(self.token_ids) - self.start

    @property
    def k(self) -> int:
        if self.head_ids is not None:
            return int(self.head_ids.shape[1])
        assert self.top_k is not None
        return self.top_k

    @property
    def nbytes(self) -> int:
        """Of the query itself."""
        return self.token_ids.nbytes + (0 if self.head_ids is None else self.head_ids.nbytes)


def answer_bytes(query: ScoreQuery) -> int:
    """Memory of the assembled rows of `query`, without head ids that came with it."""
    a_candidate = (4 if query.head_ids is None else 0) + (4 if query.f32 else 2)
    samples = 4 * query.tail_samples + 4 if query.tail_samples else 0
    return query.rows * (query.k * a_candidate + samples + 8)


def request_of(
    query: ScoreQuery, request_id: str, next_position: int = 0
) -> teacher_pb2.ScoreRequest:
    """The message that asks for `query`, from `next_position` on (0: all rows)."""
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
    )
    if query.head_ids is not None:
        request.head_ids = np.asarray(query.head_ids, dtype="<i4").tobytes()
    else:
        request.top_k = query.k
    return request


def identity_of(fingerprint: str, version: int) -> str:
    """The value of IDENTITY_KEY."""
    return f"{fingerprint} version {version}"


def row_key(fingerprint: str, version: int, query: ScoreQuery) -> bytes:
    """The 32 bytes under which the rows of `query` by this teacher are stored: every input of them
    counts.
    """
    facts = [
        fingerprint,
        version,
        len(query.token_ids),
        query.start,
        "top_k" if query.head_ids is None else "head_ids",
        query.k,
        # The wire carries a float32; both ends must make the same key of it.
        float(np.float32(query.temperature)).hex(),
        query.f32,
        rows.VERSION,
    ]
    if query.tail_samples:
        facts += [query.tail_samples, query.seed]
    hasher = hashlib.sha256(json.dumps(facts).encode() + b"\n")
    hasher.update(np.asarray(query.token_ids, dtype="<i4").tobytes())
    if query.head_ids is not None:
        hasher.update(np.asarray(query.head_ids, dtype="<i4").tobytes())
    return hasher.digest()


def tokenizer_fingerprint(tokens: Sequence[str]) -> str:
    """sha256 of a vocabulary: the token of id 0, 1, ... ("" for an unused id), each with its length
    in bytes.

    Teacher and student both take `[tokenizer.convert_ids_to_tokens(i) or "" for i in
    range(len(tokenizer))]`.
    """
    hasher = hashlib.sha256()
    for token in tokens:
        data = token.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(4, "little") + data)
    return hasher.hexdigest()

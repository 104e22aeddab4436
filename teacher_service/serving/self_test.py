"""The self-test at startup: checks that the engine returns consistent rows on this machine.

The test compares rows of the engine with each other. Therefore the test cannot detect wrong
weights, such as a quantised head without its scales; the engines refuse such models during loading.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.teacher.query import ScoreQuery
from protos.errors import WrongState
from protos.rows.codec import RowBlock
from teacher_service.engines.base import ScoringEngine

# Largest difference in nats between two scorings of a row, by dtype: batching reorders sums.
_TOLERANCES = {"float32": 1e-3, "float64": 1e-6}
_HALF_TOLERANCE = 0.5
# Tolerances within one row: its parts come from the same logits and differ only by rounding.
_GATHER_TOLERANCE, _MASS_TOLERANCE = 1e-5, 1e-3
_LENGTH, _TOP_K = 8, 32


def run_self_test(engine: ScoringEngine) -> float:
    """Score a short sequence twice alone, in a batch, and with its own tokens as head ids.

    Returns the largest difference in nats between two scorings of a token. Raises WrongState in
    these cases:

    - the difference exceeds rounding; for a batch-invariant engine: the difference is not 0
    - a row depends on later tokens: the model is not causal
    - a token's log-prob differs from the head log-prob of the same id
    - the probabilities of a row do not sum to 1
    """
    info = engine.info
    rng = np.random.default_rng(0)
    short_length, long_length = (min(length, info.max_length) for length in (_LENGTH, 3 * _LENGTH))
    tokens = rng.integers(0, info.vocab_size, long_length).astype(np.int32)
    k = min(_TOP_K, info.vocab_size, info.limits.max_top_k or info.vocab_size)
    reversed_query = ScoreQuery(tokens[::-1].copy(), 1, top_k=k)
    query = ScoreQuery(tokens[:short_length], 1, top_k=k)
    gather_query = ScoreQuery(tokens[:short_length], 1, head_ids=tokens[1:short_length, None])

    single_rows = _score(engine, [query])[0]
    repeated_rows = _score(engine, [query])[0]
    max_chosen_ids = info.limits.max_chosen_ids
    gather_queries = [gather_query] if max_chosen_ids is None or max_chosen_ids else []
    # This sequence begins with the short sequence. It is shorter than the reversed sequence, whose
    # rotary factors may differ (LongRoPE).
    longer = ScoreQuery(tokens[: 2 * short_length], 1, top_k=k)
    batched_rows, _, prefix_rows, *gathered_blocks = _score(
        engine, [query, reversed_query, longer, *gather_queries]
    )
    rounding = _TOLERANCES.get(info.dtype, _HALF_TOLERANCE)
    tolerance = 0.0 if info.batch_invariant else rounding
    differences = [
        _require_close(
            "scored twice", single_rows.token_logprobs, repeated_rows.token_logprobs, tolerance
        ),
        _require_close(
            "scored in a batch", single_rows.token_logprobs, batched_rows.token_logprobs, tolerance
        ),
    ]
    for block in gathered_blocks:
        head_logprobs = block.head_logprobs[:, 0]
        _require_close(
            "gathered as a head id", block.token_logprobs, head_logprobs, _GATHER_TOLERANCE
        )
        tolerance = max(tolerance, _GATHER_TOLERANCE)
        _require_close(
            "scored at given head ids", batched_rows.token_logprobs, head_logprobs, tolerance
        )
    for block in (single_rows, *gathered_blocks):
        mass = np.exp(block.head_logprobs).sum(1) + np.exp(block.tail_logmass)
        _require_close("summed over a row", np.log(mass), np.zeros(len(mass)), _MASS_TOLERANCE)
    prefix_logprobs = prefix_rows.token_logprobs[: short_length - 1]
    _require_close(
        "scored with other tokens after it", single_rows.token_logprobs, prefix_logprobs, rounding
    )
    return max(differences)


def _score(engine: ScoringEngine, queries: list[ScoreQuery]) -> list[RowBlock]:
    answers = engine.score(queries)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return [answer for answer in answers if isinstance(answer, RowBlock)]


def _require_close(
    case: str, first: NDArray[np.float32], second: NDArray[np.floating[Any]], tolerance: float
) -> float:
    difference = float(np.max(np.abs(first - second)))
    if not difference <= tolerance:
        raise WrongState(
            f"self-test failed: log-probs differ by {difference:.3g} nats when {case}; at most"
            f" {tolerance:.3g} is allowed",
            field="--model",
            hint="try --dtype float32, or --device cpu",
        )
    return difference

"""Rows of a teacher against the model's own logits, computed by transformers in float64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from clients.teacher.query import ScoreQuery
from protos.rows.codec import RowBlock


@dataclass(frozen=True)
class Differences:
    """Of log-probs, in nats: the largest, the root of the mean square, the median of the sizes.

    The median is not moved by the few rows of a model with experts whose router, by a rounding,
    takes another expert.
    """

    largest: float
    rms: float
    median: float


class Exact:
    """A model of transformers in float64, with the weights of `path`.

    Its norms and its rotary embedding are in float32, as transformers has them.
    """

    def __init__(self, path: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        ).eval()

    @torch.no_grad()
    def logprobs(self, query: ScoreQuery) -> np.ndarray[Any, Any]:
        """float64 [rows, V]: of every id, at the temperature of the query."""
        ids = torch.from_numpy(query.token_ids[:-1]).long()[None]
        logits = self.model(input_ids=ids).logits[0, query.start - 1 :].double()
        exact_logprobs: np.ndarray[Any, Any] = (logits / query.temperature).log_softmax(1).numpy()
        return exact_logprobs

    def differences(self, query: ScoreQuery, rows: RowBlock) -> Differences:
        """Of head, tail and token; the head's ids are those of `rows`."""
        exact = self.logprobs(query)
        tokens = query.token_ids[query.start :].astype(np.int64)[:, None]
        head = np.take_along_axis(exact, rows.head_ids.astype(np.int64), 1)
        remaining_logprobs = exact.copy()
        np.put_along_axis(remaining_logprobs, rows.head_ids.astype(np.int64), -np.inf, 1)
        tail = np.logaddexp.reduce(remaining_logprobs, axis=1)
        token = np.take_along_axis(exact, tokens, 1)[:, 0]
        column_differences = [
            rows.head_logprobs - head,
            rows.tail_logmass - tail,
            rows.token_logprobs - token,
        ]
        flat = np.abs(np.concatenate([part.ravel() for part in column_differences]))
        return Differences(
            float(flat.max()), float(np.sqrt((flat**2).mean())), float(np.median(flat))
        )

    def assert_likeliest(self, query: ScoreQuery, rows: RowBlock, within: float) -> None:
        """The head has the k likeliest ids, but for those that are `within` nats of another."""
        exact = self.logprobs(query)
        likeliest = -np.sort(-exact, axis=1)[:, : rows.head_ids.shape[1]]
        named = np.take_along_axis(exact, rows.head_ids.astype(np.int64), 1)
        np.testing.assert_allclose(-np.sort(-named, axis=1), likeliest, atol=within)


def queries(vocab_size: int, lengths: tuple[int, ...] = (2, 40, 300)) -> list[ScoreQuery]:
    """Sequences of these lengths: the teacher's likeliest ids, and at another temperature."""
    rng = np.random.default_rng(95)
    ids = [rng.integers(0, vocab_size, length).astype(np.int32) for length in lengths]
    return [
        ScoreQuery(token_ids, 1, top_k=8, temperature=temperature, f32=True)
        for token_ids in ids
        for temperature in (1.0, 0.7)
    ]

"""Captured stores with rows by their definition, from a plain log_softmax in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clients.data.tokens.tokenizer import tokens_of
from clients.store.manifest import PART, SEQUENCES, UNSPLIT, key_of
from clients.store.store import LogitStore, StoredRows
from clients.teacher.query import tokenizer_fingerprint
from protos.rows.codec import RowBlock, encode_rows

Text = tuple[list[int], int]  # token ids, first scored position


def sums(count: int, *, seed: int = 0) -> list[Text]:
    """Return additions in the tokens of `tiny`: `12+34=46` and the end token."""
    from tests.student_trainer import tiny

    words = tiny.tokenizer()
    numbers = np.random.default_rng(seed).integers(0, 100, (count, 2)).tolist()
    texts = []
    for a, b in numbers:
        prompt = words(f"{a}+{b}=")["input_ids"]
        answer = words(str(a + b))["input_ids"]
        texts.append(([*prompt, *answer, words.eos_token_id], len(prompt)))
    return texts


@torch.no_grad()
def logprobs_of(model: Any, text: Text, temperature: float = 1.0) -> Tensor:
    """Return log-probs [scored tokens, V] in float64."""
    ids, start = text
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, start - 1 : -1]
    return (logits.double() / temperature).log_softmax(1)


def block_of(model: Any, text: Text, *, top_k: int, samples: int, temperature: float) -> RowBlock:
    """Return the rows of a text; tail samples have one random stream per text."""
    ids, start = text
    logprobs = logprobs_of(model, text, temperature)
    head = logprobs.topk(top_k).indices
    tail = logprobs.exp().scatter(1, head, 0.0)
    tail_samples: dict[str, Any] = {}
    if samples:
        generator = torch.Generator().manual_seed(sum(ids))
        draws = tail.multinomial(samples, replacement=True, generator=generator)
        tail_samples = {
            "tail_sample_ids": draws.numpy().astype(np.int32),
            "tail_sample_logprob": logprobs.gather(1, draws).mean(1).float().numpy(),
        }
    token = torch.tensor(ids[start:])[:, None]
    return RowBlock(
        head_ids=head.numpy().astype(np.int32),
        head_logprobs=logprobs.gather(1, head).float().numpy(),
        tail_logmass=tail.sum(1).log().float().numpy(),
        token_logprobs=logprobs.gather(1, token)[:, 0].float().numpy(),
        **tail_samples,
    )


def write_store(
    path: Path,
    model: Any,
    texts: Sequence[Text],
    *,
    top_k: int = 4,
    samples: int = 0,
    temperature: float = 1.0,
    per_shard: int = 8,
    **facts: str,
) -> Path:
    from tests.student_trainer import tiny

    metadata = {
        "teacher_fingerprint": "of a test",
        "tokenizer_fingerprint": tokenizer_fingerprint(tokens_of(tiny.tokenizer())),
        "vocab_size": str(len(tiny.ALPHABET) + 1),
        "top_k": str(top_k),
        "temperature": str(temperature),
        "tail_samples": str(samples),
        "form": "completion",
        PART: UNSPLIT,
        SEQUENCES: str(len(texts)),
    }
    entries = [
        StoredRows(
            key=key_of(number),
            token_ids=np.array(text[0], "<i4").tobytes(),
            start=text[1],
            rows=encode_rows(
                block_of(model, text, top_k=top_k, samples=samples, temperature=temperature),
                f32=True,
            ),
        )
        for number, text in enumerate(texts)
    ]
    with LogitStore(path, write=True, metadata=metadata | facts) as store:
        for first in range(0, len(entries), per_shard):
            store.append(entries[first : first + per_shard])
    return path

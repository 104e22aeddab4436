"""A readable sample of one stored sequence: tokens, probabilities and head, ready for JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from clients.store.dataset import LogitDataset
from protos.errors import InvalidInput, NotFound

Decode = Callable[[Sequence[int]], str]


def sample_of(
    store: Path | str, sequence: int, *, rows: int, head: int, tokenizer: Path | None
) -> dict[str, Any]:
    """Return the first `rows` rows of a sequence, each with its `head` most likely head ids.

    `tokenizer` is a directory with a tokenizer.json; None uses the directory named in the store's
    metadata. If None is given and that file does not exist, all texts are None.

    Raises NotFound if there is no such store or sequence, Corrupt if it is damaged, InvalidInput if
    the tokenizer cannot be loaded.
    """
    data = LogitDataset(store)
    try:
        item = data[sequence]
    except IndexError as error:
        raise NotFound(
            f"{store} has no sequence {sequence}",
            hint=f"it has {len(data)} sequences, numbered from 0",
        ) from error
    text_of = _decoder(tokenizer or Path(data.metadata.get("tokenizer") or "?"), tokenizer)
    ids, start = item["input_ids"], item["start"]
    drawn = item.get("tail_sample_ids", [()] * rows)
    shown = []
    for row in range(min(rows, len(item["tail_logmass"]))):
        token = int(ids[start + row])
        likeliest = [
            {"id": int(one), "text": text_of([int(one)]), "probability": math.exp(log_prob)}
            for one, log_prob in zip(
                item["head_ids"][row][:head], item["head_logprobs"][row][:head], strict=True
            )
        ]
        shown.append(
            {
                "position": start + row,
                "id": token,
                "text": text_of([token]),
                "probability": math.exp(item["token_logprobs"][row]),
                "tail": math.exp(item["tail_logmass"][row]),
                "head": likeliest,
                "drawn": [{"id": int(one), "text": text_of([int(one)])} for one in drawn[row]],
            }
        )
    return {
        "sequence": sequence,
        "tokens": len(ids),
        "start": start,
        "prompt": text_of([int(one) for one in ids[:start]]),
        "scored": text_of([int(one) for one in ids[start:]]),
        "rows": shown,
    }


def _decoder(directory: Path, given: Path | None) -> Callable[[Sequence[int]], str | None]:
    """Load tokenizer.json with `tokenizers`, which imports much faster than `transformers`."""
    file = directory / "tokenizer.json"
    if not file.is_file() and given is None:
        return lambda ids: None
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare exceptions
        raise InvalidInput(
            f"cannot load {file}: {error}",
            field="--tokenizer",
            hint="give a directory that contains a tokenizer.json",
        ) from error
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)

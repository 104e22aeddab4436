"""A sample of a stored sequence for people: its tokens, probabilities and head ids."""

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
    """Return the first `rows` rows of a sequence, as values for JSON.

    - `head`: number of most likely head ids to return per row
    - `tokenizer`: directory with a tokenizer.json. None: the directory in the store's metadata; if
      that directory does not exist, all texts are None.

    Raises NotFound if there is no such store or sequence, Corrupt if it is damaged, InvalidInput if
    the tokenizer cannot be loaded.
    """
    dataset = LogitDataset(store)
    try:
        stored_sequence = dataset[sequence]
    except IndexError as error:
        raise NotFound(
            f"{store} has no sequence {sequence}",
            hint=f"the store has {len(dataset)} sequences, numbered from 0",
        ) from error
    text_of = _load_decoder(tokenizer or Path(dataset.metadata.get("tokenizer") or "?"), tokenizer)
    ids, start = stored_sequence["input_ids"], stored_sequence["start"]
    tail_sample_ids = stored_sequence.get("tail_sample_ids", [()] * rows)
    row_samples = []
    for row in range(min(rows, len(stored_sequence["tail_logmass"]))):
        token = int(ids[start + row])
        head_tokens = [
            {
                "id": int(token_id),
                "text": text_of([int(token_id)]),
                "probability": math.exp(log_prob),
            }
            for token_id, log_prob in zip(
                stored_sequence["head_ids"][row][:head],
                stored_sequence["head_logprobs"][row][:head],
                strict=True,
            )
        ]
        row_samples.append(
            {
                "position": start + row,
                "id": token,
                "text": text_of([token]),
                "probability": math.exp(stored_sequence["token_logprobs"][row]),
                "tail": math.exp(stored_sequence["tail_logmass"][row]),
                "head": head_tokens,
                "drawn": [
                    {"id": int(token_id), "text": text_of([int(token_id)])}
                    for token_id in tail_sample_ids[row]
                ],
            }
        )
    return {
        "sequence": sequence,
        "tokens": len(ids),
        "start": start,
        "prompt": text_of([int(token_id) for token_id in ids[:start]]),
        "scored": text_of([int(token_id) for token_id in ids[start:]]),
        "rows": row_samples,
    }


def _load_decoder(
    directory: Path, requested_directory: Path | None
) -> Callable[[Sequence[int]], str | None]:
    """Return a function that decodes token ids to a text, or to None without a tokenizer.

    The function uses `tokenizers`, whose import is much faster than that of `transformers`.
    """
    file = directory / "tokenizer.json"
    if not file.is_file() and requested_directory is None:
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

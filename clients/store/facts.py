"""What the manifest of a captured store tells about its rows, and when two stores are of one kind.

teacher, tokenizer, data       names, for people; the same rows may be made elsewhere
teacher_fingerprint, teacher_version, tokenizer_fingerprint, vocab_size
top_k, temperature, logprob_format, compress, tail_samples, seed
form, columns, template, max_tokens
data_fingerprint               of the files, or what the hub's library makes of them
sequences_fingerprint          of the token ids that were made of all data
too_long, empty                records of the data that were left out
part                           i/n: which part of the data this store is to hold
sequences                      of this part, once it is complete
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from clients.store.shards import KEY_BYTES
from protos.errors import WrongState

_NAMES = ("teacher", "tokenizer", "data")
PART, SEQUENCES = "part", "sequences"
WHOLE = "0/1"


def key_of(index: int) -> bytes:
    """Of sequence `index` of the data, counted over all parts."""
    return index.to_bytes(KEY_BYTES, "big")


def require_same(
    path: Path,
    stored: Mapping[str, str],
    asked: Mapping[str, str],
    *,
    ignoring: tuple[str, ...] = (),
    hint: str = "use another directory",
) -> None:
    """Raises WrongState with the first fact that differs."""
    for name in [*asked, *stored]:
        if name in _NAMES or name in ignoring or stored.get(name) == asked.get(name):
            continue
        raise WrongState(
            f"{path} holds rows with {name} = {stored.get(name, 'none')}, not"
            f" {asked.get(name, 'none')}",
            hint=hint,
        )

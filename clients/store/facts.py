"""Metadata keys in the manifest of a captured store, and the comparison of two stores.

teacher, tokenizer, data       display names; ignored when two stores are compared
teacher_fingerprint, teacher_version, tokenizer_fingerprint, vocab_size
top_k, temperature, logprob_format, compress, tail_samples, seed
form, columns, template, max_tokens
image_column                   of the images, which sequences name; absent if the capture has none
context                        text that only the teacher has read; absent if the capture has none
data_fingerprint               fingerprint of the data files, or the one `datasets` computes
sequences_fingerprint          fingerprint of the token ids of all data
too_long, empty                number of records left out, by reason
part                           i/n: part i (from 0) of the n parts of the data
sequences                      number of sequences in this part when it is complete
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from clients.store.shards import KEY_BYTES
from protos.errors import WrongState

_DISPLAY_NAMES = ("teacher", "tokenizer", "data")
PART, SEQUENCES = "part", "sequences"
UNSPLIT = "0/1"


def key_of(index: int) -> bytes:
    """Return the store key of sequence `index`, counted from 0 over all parts of the data."""
    return index.to_bytes(KEY_BYTES, "big")


def require_same(
    path: Path | str,
    stored: Mapping[str, str],
    expected: Mapping[str, str],
    *,
    ignoring: tuple[str, ...] = (),
    hint: str = "use another directory",
) -> None:
    """Compare the metadata `stored` in the store at `path` with the metadata `expected`.

    Display names and the keys in `ignoring` are not compared. Raises WrongState, naming the first
    key whose values differ.
    """
    for name in [*expected, *stored]:
        if name in _DISPLAY_NAMES or name in ignoring or stored.get(name) == expected.get(name):
            continue
        raise WrongState(
            f"{path} holds rows with {name} = {stored.get(name, 'none')}, not"
            f" {expected.get(name, 'none')}",
            hint=hint,
        )

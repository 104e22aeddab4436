"""Creates a store from `prompt_logprobs` that vLLM has computed.

A dump is a .jsonl file with one sequence per line. A line is one of these objects:

- a response of vLLM's `/v1/completions` to a request with `prompt_logprobs` and `return_token_ids`
- an object with `prompt_token_ids` and `prompt_logprobs`, which have the form of vLLM's
  RequestOutput

A line may also contain `start`, the first scored position (default 1). The log-probs must come from
the full softmax at temperature 1. This is vLLM's default (--logprobs-mode raw_logprobs).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.data.models.shape import logits_in
from clients.data.outside import open_regular, parse_ids, parse_json
from clients.data.tokens.tokenizer import tokens_in
from clients.store.manifest import PART, SEQUENCES, UNSPLIT, key_of
from clients.store.shards import StoredRows
from clients.store.writer import StoreWriter
from clients.teacher.query import tokenizer_fingerprint
from protos.errors import InvalidInput
from protos.rows.checks import are_ids
from protos.rows.codec import encode_rows
from protos.rows.prompt_logprobs import rows_of_listed

_SEQUENCES_PER_FILE = 256
# Exceptions of parsing a line that has another form.
_PARSE_ERRORS = (ValueError, KeyError, IndexError, TypeError, AttributeError)


@dataclass(frozen=True)
class Dump:
    """A dump, and values that the dump does not contain.

    - `tokenizer`: the teacher's tokenizer
    - `vocab_size`: the teacher's number of logits
    - `top_k`: number of head ids to keep per row; None: the number in the first line
    - `teacher`: display name
    """

    path: Path
    tokenizer: Path
    vocab_size: int | None = None
    top_k: int | None = None
    teacher: str = ""


@dataclass(frozen=True)
class _DumpedSequence:
    token_ids: NDArray[np.int32]
    start: int
    listed: Sequence[Mapping[str, Any]]


def import_dump(out: Path, dump: Dump) -> int:
    """Write the rows of a dump into the store `out`, and return the number of its sequences.

    If an earlier call was interrupted, this call continues with the first missing file. Raises
    InvalidInput, naming the line, if the dump cannot be read, and WrongState if `out` is a store of
    other data.
    """
    digest, count = _digest_and_lines(dump.path)
    lines = _read_sequences(dump.path)
    first_sequence = next(lines, None)
    if first_sequence is None:
        raise InvalidInput(f"{dump.path} is empty", field="--dump", hint="give a .jsonl file")
    try:
        listed_ids = _count_listed_ids(first_sequence)
    except _PARSE_ERRORS as error:
        raise _bad_line(dump.path, 0, f"this is not an answer of vLLM: {error!r}") from error
    if listed_ids < (dump.top_k or 1):
        raise _bad_line(dump.path, 0, f"a position lists {listed_ids} likeliest ids")
    top_k = dump.top_k or listed_ids
    facts = _store_facts(dump, digest, count, top_k)
    vocab_size = int(facts["vocab_size"])
    counts = [
        min(_SEQUENCES_PER_FILE, count - start) for start in range(0, count, _SEQUENCES_PER_FILE)
    ]
    with StoreWriter(out, facts, counts) as writer:
        written_sequences = writer.files * _SEQUENCES_PER_FILE
        entries: list[StoredRows] = []
        for number, sequence in enumerate(_read_sequences(dump.path)):
            if number < written_sequences:
                continue
            entries.append(_encode_sequence(dump.path, number, sequence, top_k, vocab_size))
            if len(entries) == counts[writer.files]:
                writer.append(entries)
                entries = []
    return count


def _encode_sequence(
    path: Path, number: int, sequence: _DumpedSequence, top_k: int, vocabulary: int
) -> StoredRows:

    def require_ids(ids: NDArray[np.int32]) -> None:
        if not are_ids(ids, vocabulary):
            worst = ids.min() if ids.min() < 0 else ids.max()
            problem = f"id {worst} is none of the {vocabulary} ids of the vocabulary"
            raise _bad_line(path, number, problem, "check --tokenizer and --vocab-size")

    require_ids(sequence.token_ids)
    scored_tokens = sequence.token_ids[sequence.start :]
    try:
        rows = rows_of_listed(sequence.listed[sequence.start :], scored_tokens, top_k)
    except ValueError as error:
        raise _bad_line(path, number, str(error)) from error
    assert rows.head_ids is not None
    require_ids(rows.head_ids)
    token_bytes = sequence.token_ids.astype("<i4").tobytes()
    return StoredRows(key_of(number), token_bytes, sequence.start, encode_rows(rows))


def _store_facts(dump: Dump, digest: str, count: int, top_k: int) -> dict[str, str]:
    tokens = tokens_in(dump.tokenizer)
    if tokens is None:
        raise InvalidInput(
            f"cannot read {dump.tokenizer / 'tokenizer.json'}",
            field="--tokenizer",
            hint="give the directory of the teacher's model or tokenizer",
        )
    facts = {
        "teacher": dump.teacher,
        "tokenizer": str(dump.tokenizer.absolute()),
        "data": str(dump.path.absolute()),
        # The dump does not identify its weights: the digest of its bytes stands for them.
        "teacher_fingerprint": digest,
        "teacher_version": 0,
        "tokenizer_fingerprint": tokenizer_fingerprint(tokens),
        "vocab_size": dump.vocab_size or logits_in(dump.tokenizer) or len(tokens),
        "top_k": top_k,
        "temperature": 1.0,
        "logprob_format": "f16",
        "compress": "false",
        "tail_samples": 0,
        "seed": 0,
        "form": "prompt_logprobs",
        "data_fingerprint": digest,
        "sequences_fingerprint": digest,
        "too_long": 0,
        "empty": 0,
        PART: UNSPLIT,
        SEQUENCES: count,
    }
    return {name: str(value) for name, value in facts.items()}


def _digest_and_lines(path: Path) -> tuple[str, int]:
    try:
        with open_regular(path) as stream:
            hasher, lines, last_byte = hashlib.sha256(), 0, b"\n"
            while part := stream.read(1 << 20):
                hasher.update(part)
                lines += part.count(b"\n")
                last_byte = part[-1:]
    except OSError as error:
        raise InvalidInput(
            f"cannot read {path}: {error.strerror}", field="--dump", hint="give a .jsonl file"
        ) from error
    return hasher.hexdigest(), lines + (last_byte != b"\n")


def _read_sequences(path: Path) -> Iterator[_DumpedSequence]:
    with open_regular(path) as stream:
        for number, line in enumerate(stream):
            try:
                yield _sequence_of(parse_json(line))
            except _PARSE_ERRORS as error:
                raise _bad_line(
                    path, number, f"this is not an answer of vLLM: {error!r}"
                ) from error


def _sequence_of(record: Any) -> _DumpedSequence:
    start = record.get("start", 1)
    answer = record["choices"][0] if "choices" in record else record
    token_ids, listed = answer["prompt_token_ids"], answer["prompt_logprobs"]
    if len(listed) != len(token_ids):
        raise ValueError(f"{len(token_ids)} token ids and {len(listed)} prompt_logprobs")
    if type(start) is not int or not 1 <= start < len(token_ids):
        count = len(token_ids)
        raise ValueError(f"start is {start}, not an integer from 1 to {count - 1} ({count} tokens)")
    return _DumpedSequence(parse_ids(token_ids), start, listed)


def _count_listed_ids(sequence: _DumpedSequence) -> int:
    """Return the number of most likely ids that the dump lists at every scored position.

    The dump also lists the token at each position, which is counted only if it is one of these ids.
    """
    return min(_count_leading_ranks(entries) for entries in sequence.listed[sequence.start :])


def _count_leading_ranks(entries: Mapping[str, Any]) -> int:
    ranks = {entry["rank"] for entry in entries.values()}
    return next(rank for rank in range(1, len(ranks) + 2) if rank not in ranks) - 1


def _bad_line(
    path: Path,
    number: int,
    problem: str,
    hint: str = "give lines with prompt_token_ids and prompt_logprobs, which vLLM returns on"
    " request",
) -> InvalidInput:
    return InvalidInput(f"{path}, line {number + 1}: {problem}"[:300], field="--dump", hint=hint)

"""Whether a student's tokens are its teacher's, as far as the student's files tell without torch.

The trainer compares what its tokenizer says, and the shape of the weights; it is the judge of what
passes here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from clients.data.regular_file import read_document
from clients.data.tokenization import first_difference
from clients.data.tokenizer_file import tokens_in
from clients.teacher.info import TeacherInfo
from clients.teacher.query import tokenizer_fingerprint
from protos.errors import WrongState

_MOST_SEEN = 256


class StudentTokens:
    """Compares a student with a teacher once, until one of them changes; for many threads."""

    def __init__(self) -> None:
        # To read a large vocabulary holds up every thread for a tenth of a second: once will do.
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, int, int, str], str] = {}

    def check(
        self, model: Path, info: TeacherInfo, label: str, vocabulary: Callable[[], Sequence[str]]
    ) -> None:
        """Refuse a directory with other tokens than the teacher's, or for another number of ids.

        Raises WrongState. `vocabulary`: asks the teacher, which is done where they may differ.
        """
        difference = self._difference(model, info.tokenizer_fingerprint, vocabulary)
        if difference:
            raise WrongState(
                difference,
                field="student.model",
                hint=f"distillation by token id needs a student with the {label}'s tokenizer",
            )
        width = _width(model)
        if width is not None and width != info.vocab_size:
            raise WrongState(
                f"the student has logits for {width} ids, the {label} for {info.vocab_size}",
                field="student.model",
                hint=f"give a student with the {label}'s tokenizer, or pad or trim its embeddings"
                " to the teacher's size",
            )

    def _difference(
        self, model: Path, fingerprint: str, vocabulary: Callable[[], Sequence[str]]
    ) -> str:
        """A sentence, or "" for none that is certain."""
        try:
            facts = (model / "tokenizer.json").stat()
        except OSError:
            return ""
        key = (str(model), facts.st_mtime_ns, facts.st_size, fingerprint)
        with self._lock:
            if key in self._seen:
                return self._seen[key]
            tokens = tokens_in(model)
            if tokens is None or tokenizer_fingerprint(tokens) == fingerprint:
                return self._remembered(key, "")
        # Not with the lock: a teacher may take its time, and others ask other teachers.
        difference = _compared(tokens, vocabulary())
        with self._lock:
            return self._remembered(key, difference)

    def _remembered(self, key: tuple[str, int, int, str], difference: str) -> str:
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen[key] = difference
        return difference


def _compared(tokens: Sequence[str], theirs: Sequence[str]) -> str:
    """A sentence about the first token that certainly differs, or ""."""
    # What the file does not name may be named elsewhere: only an id with two tokens is certain.
    named = [ours or other for ours, other in zip(tokens, theirs, strict=False)]
    return "" if named == [*theirs[: len(named)]] else first_difference(theirs, named)


def _width(model: Path) -> int | None:
    """Of a student directory's logits; None where its config does not say."""
    try:
        config = read_document(model / "config.json")
        width = config.get("text_config", config)["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return width if isinstance(width, int) else None

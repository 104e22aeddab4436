"""Compares a student's tokenizer with its teacher's, from the student's files and without torch.

Only certain differences are reported. The trainer later compares the loaded tokenizer and the
shapes of the weights, and detects the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from clients.data.models.shape import logits_in
from clients.data.tokens.tokenizer import first_difference, tokens_in
from clients.preflight.vocabulary import common_ids, other_tokenizer, require_narrowing
from clients.teacher.info import TeacherInfo
from clients.teacher.query import tokenizer_fingerprint

_MAX_CACHED = 256


class StudentTokens:
    """Compares students with teachers and caches each result until one of the two changes.

    Thread-safe.
    """

    def __init__(self) -> None:
        # Reading a large vocabulary holds the GIL for about 0.1 s, so one thread at a time reads.
        self._lock = threading.Lock()
        self._differences: dict[tuple[str, int, int, str], str] = {}

    def check(
        self, model: Path, info: TeacherInfo, label: str, vocabulary: Callable[[], Sequence[str]]
    ) -> None:
        """Check the model directory of a student against the teacher's info.

        `vocabulary` requests the teacher's tokens; it is called only if the fingerprints of the
        tokenizers differ. Raises WrongState if a token certainly differs, or if the numbers of
        logits differ by more than padding.
        """
        difference = self._find_difference(model, info.tokenizer_fingerprint, vocabulary)
        if difference:
            raise other_tokenizer(difference, label)
        width = logits_in(model)
        if width is not None and width != info.vocab_size:
            with self._lock:
                tokens = tokens_in(model) or []
            shared_ids = common_ids(width, info.vocab_size, label, tokens)
            require_narrowing(info, shared_ids, label, "student.model")

    def _find_difference(
        self, model: Path, fingerprint: str, vocabulary: Callable[[], Sequence[str]]
    ) -> str:
        """Return a sentence about a certain difference, or ""."""
        try:
            file_stat = (model / "tokenizer.json").stat()
        except OSError:
            return ""
        key = (str(model), file_stat.st_mtime_ns, file_stat.st_size, fingerprint)
        with self._lock:
            if key in self._differences:
                return self._differences[key]
            tokens = tokens_in(model)
            if tokens is None or tokenizer_fingerprint(tokens) == fingerprint:
                return self._cache_difference(key, "")
        # Outside the lock: a slow teacher must not delay the checks against other teachers.
        difference = _compare_tokens(tokens, vocabulary())
        with self._lock:
            return self._cache_difference(key, difference)

    def _cache_difference(self, key: tuple[str, int, int, str], difference: str) -> str:
        if len(self._differences) >= _MAX_CACHED:
            self._differences.clear()
        self._differences[key] = difference
        return difference


def _compare_tokens(student_tokens: Sequence[str], teacher_tokens: Sequence[str]) -> str:
    """Return a sentence about the first token that certainly differs, or ""."""
    # Another file may name the ids that tokenizer.json leaves empty, so only an id with two
    # different tokens is a difference.
    compared_tokens = [
        student_token or teacher_token
        for student_token, teacher_token in zip(student_tokens, teacher_tokens, strict=False)
    ]
    return (
        ""
        if compared_tokens == [*teacher_tokens[: len(compared_tokens)]]
        else first_difference(teacher_tokens, compared_tokens)
    )

"""Tokenizers that differ only in special tokens, such as those of Qwen2.5 and R1-Distill.

Both tokenizers have the same ordinary tokens at the same ids. Each token that only one tokenizer
has is paired with a token of the other tokenizer. A teacher's row is then a permutation of a row
over the student's ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.data.outside import read_document
from clients.data.tokens.answers import answer_end
from clients.data.tokens.tokenizer import tokens_in, tokens_of
from protos.errors import InvalidInput

FIELD = "teacher.roles"


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens of a tokenizer, and the roles of its added tokens.

    - tokens: the token of each id; "" for an unused id.
    - special: ids of special tokens, which have no text.
    - text: ids of other added tokens, which have text, such as <think> of Qwen3.
    - ends: the id that ends an answer, and the end-of-sequence id; -1 means none.
    """

    tokens: Sequence[str]
    special: frozenset[int]
    text: frozenset[int]
    ends: tuple[int, int]

    @classmethod
    def of(cls, tokenizer: Any) -> SpecialTokens:
        """Return the tokens and roles of a tokenizer that transformers has loaded."""
        added_tokens = tokenizer.added_tokens_decoder
        special = frozenset(number for number, token in added_tokens.items() if token.special)
        ends = answer_end(tokenizer), tokenizer.eos_token_id
        answer_end_id, eos_id = (-1 if end is None else end for end in ends)
        return cls(
            tokens_of(tokenizer),
            special,
            frozenset(added_tokens) - special,
            (answer_end_id, eos_id),
        )

    @classmethod
    def in_directory(cls, model: Path) -> SpecialTokens | None:
        """Return the tokens and roles of the tokenizer in a Hugging Face directory.

        The end of an answer is `eos_token`. Returns None if the files cannot be interpreted.
        """
        tokens = tokens_in(model)
        try:
            added_tokens = read_document(model / "tokenizer.json").get("added_tokens", [])
            special = frozenset(token["id"] for token in added_tokens if token["special"])
            eos_entry = read_document(model / "tokenizer_config.json").get("eos_token") or ""
            end = eos_entry["content"] if isinstance(eos_entry, dict) else eos_entry
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        if tokens is None:
            return None
        number = tokens.index(end) if end in tokens else -1
        text = frozenset(token["id"] for token in added_tokens) - special
        return cls(tokens, special, text, (number, number))

    def is_ordinary(self, number: int) -> bool:
        """Return whether an id has a token, and the token is not an added token."""
        is_added = number in self.special or number in self.text
        return bool(self.token(number)) and not is_added

    def token(self, number: int) -> str:
        """Return the token of an id; "" if the id has none."""
        return self.tokens[number] if number < len(self.tokens) else ""


@dataclass(frozen=True)
class SpecialTokenMap:
    """The map from the ids of a student to the ids of its teacher.

    - ids [n] int32: the teacher's id for each id of the student, a permutation of 0 to n - 1.
    - pairs: (student token, teacher token) with the same role and different names.
    - missing: tokens of either tokenizer that have text but no counterpart. The other tokenizer
      encodes this text with ordinary tokens.
    """

    ids: NDArray[np.int32]
    pairs: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]


def map_special_tokens(
    student: SpecialTokens, teacher: SpecialTokens, explicit_pairs: Mapping[str, str] | None = None
) -> SpecialTokenMap | None:
    """Pair the added tokens of two tokenizers; None if their ordinary tokens differ.

    `explicit_pairs`: the teacher's token for a token of the student. Other tokens are paired if
    both end an answer, both end a sequence, or both have the same text. The remaining tokens, which
    do not occur in answers, are paired such that the fewest ids change.

    Raises InvalidInput, naming `teacher.roles`, if a token of `explicit_pairs` does not exist or
    occurs twice.
    """
    count = max(len(student.tokens), len(teacher.tokens))
    added_ids: list[int] = []
    for number in range(count):
        are_ordinary = student.is_ordinary(number), teacher.is_ordinary(number)
        if are_ordinary == (False, False):
            added_ids.append(number)
        elif are_ordinary != (True, True) or student.token(number) != teacher.token(number):
            return None
    teacher_by_student = _pair_roles(student, teacher, added_ids, explicit_pairs or {})
    pairs = [
        (student.token(student_id), teacher.token(teacher_id))
        for student_id, teacher_id in teacher_by_student.items()
    ]
    missing = [student.token(number) for number in sorted(student.text - teacher_by_student.keys())]
    missing += [
        teacher.token(teacher_id)
        for teacher_id in sorted(teacher.text - set(teacher_by_student.values()))
    ]
    _pair_remaining(teacher_by_student, added_ids)
    ids = np.arange(count, dtype=np.int32)
    ids[list(teacher_by_student)] = list(teacher_by_student.values())
    changed_pairs = tuple(
        (student_id, teacher_id) for student_id, teacher_id in pairs if student_id != teacher_id
    )
    return SpecialTokenMap(ids, changed_pairs, tuple(missing))


def _pair_roles(
    student: SpecialTokens,
    teacher: SpecialTokens,
    added_ids: Sequence[int],
    explicit_pairs: Mapping[str, str],
) -> dict[int, int]:
    """Return the teacher's id for each added id of the student that has a counterpart.

    `added_ids`: ids that are not ordinary tokens. `explicit_pairs`: see `map_special_tokens`.
    """
    student_ids = {student.token(number): number for number in added_ids if student.token(number)}
    teacher_ids = {teacher.token(number): number for number in added_ids if teacher.token(number)}
    teacher_by_student: dict[int, int] = {}

    def candidate_pairs() -> Iterator[tuple[int | None, int | None]]:
        yield from zip(student.ends, teacher.ends, strict=True)
        yield from ((student_ids[token], teacher_ids.get(token)) for token in student_ids)

    for token, teacher_token in explicit_pairs.items():
        for owner, name, ids_by_token in (
            ("student", token, student_ids),
            ("teacher", teacher_token, teacher_ids),
        ):
            if name not in ids_by_token:
                raise InvalidInput(
                    f"the {owner} has no special token {name!r}",
                    field=FIELD,
                    hint='write "token of the student" = "token of the teacher"',
                )
        if teacher_ids[teacher_token] in teacher_by_student.values():
            raise InvalidInput(
                f"the token {teacher_token!r} of the teacher is given twice",
                field=FIELD,
                hint="give each token of the teacher to one token of the student",
            )
        teacher_by_student[student_ids[token]] = teacher_ids[teacher_token]
    added_id_set, unpaired = set(added_ids), set(added_ids) - teacher_by_student.keys()
    for number, match in candidate_pairs():
        if (
            number in unpaired
            and match in added_id_set
            and match not in teacher_by_student.values()
        ):
            teacher_by_student[number] = match
            unpaired.remove(number)
    return teacher_by_student


def _pair_remaining(teacher_by_student: dict[int, int], added_ids: Sequence[int]) -> None:
    """Add the pairs of ids that have no counterpart yet to `teacher_by_student`.

    An id that is free on both sides is paired with itself, the others in ascending order.
    """
    used_ids = set(teacher_by_student.values())
    teacher_by_student |= {
        token_id: token_id
        for token_id in added_ids
        if token_id not in teacher_by_student and token_id not in used_ids
    }
    used_ids = set(teacher_by_student.values())
    unpaired = [token_id for token_id in added_ids if token_id not in teacher_by_student]
    teacher_by_student |= zip(
        unpaired, (token_id for token_id in added_ids if token_id not in used_ids), strict=True
    )

"""Tokenizers that differ in their special tokens only, such as those of Qwen2.5 and R1-Distill.

Both have the same ordinary tokens at the same ids. Each token that only one of them has is paired
with one of the other, so that a row of the teacher is one of the student's ids in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.data.answer_end import answer_end
from clients.data.regular_file import read_document
from clients.data.tokenization import tokens_of
from clients.data.tokenizer_file import tokens_in
from protos.errors import InvalidInput

FIELD = "teacher.roles"


@dataclass(frozen=True)
class TokenRoles:
    """The tokens of a tokenizer by id, "" for an unused id, and what its added ones are for.

    special: ids that stand for no text. text: added ids that stand for text, such as <think> of
    Qwen3. ends: the id that ends an answer, and the end-of-sequence id; -1: none.
    """

    tokens: Sequence[str]
    special: frozenset[int]
    text: frozenset[int]
    ends: tuple[int, int]

    @classmethod
    def of(cls, tokenizer: Any) -> TokenRoles:
        """Return those of a tokenizer of transformers."""
        added = tokenizer.added_tokens_decoder
        special = frozenset(number for number, token in added.items() if token.special)
        ends = answer_end(tokenizer), tokenizer.eos_token_id
        first, last = (-1 if end is None else end for end in ends)
        return cls(tokens_of(tokenizer), special, frozenset(added) - special, (first, last))

    @classmethod
    def in_directory(cls, model: Path) -> TokenRoles | None:
        """Return those of a Hugging Face directory, whose answers end with its eos_token.

        None if its files cannot be interpreted.
        """
        tokens = tokens_in(model)
        try:
            added = read_document(model / "tokenizer.json").get("added_tokens", [])
            special = frozenset(token["id"] for token in added if token["special"])
            named = read_document(model / "tokenizer_config.json").get("eos_token") or ""
            end = named["content"] if isinstance(named, dict) else named
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        if tokens is None:
            return None
        number = tokens.index(end) if end in tokens else -1
        text = frozenset(token["id"] for token in added) - special
        return cls(tokens, special, text, (number, number))

    def is_ordinary(self, number: int) -> bool:
        """Return whether the id has a token that was not added to the vocabulary."""
        added = number in self.special or number in self.text
        return bool(self.token(number)) and not added

    def token(self, number: int) -> str:
        """Return the token of an id, "" if it has none."""
        return self.tokens[number] if number < len(self.tokens) else ""


@dataclass(frozen=True)
class RoleMap:
    """The teacher's id of each id of the student.

    ids [n] int32: a permutation of 0 to n - 1. pairs: the tokens of student and teacher that have
    the same role. missing: tokens that stand for text and have no role in the other tokenizer: what
    they mean is spelled with other tokens there.
    """

    ids: NDArray[np.int32]
    pairs: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]


def role_map(
    student: TokenRoles, teacher: TokenRoles, given: Mapping[str, str] | None = None
) -> RoleMap | None:
    """Pair the added tokens of two tokenizers; None if their ordinary tokens differ.

    `given`: tokens of the teacher by the student's. Tokens that are not given are paired if both
    end an answer, both end a sequence, or both have the same text. The others, which nobody writes
    in an answer, are paired in an order that changes the fewest ids. Raises InvalidInput, naming
    `teacher.roles`, if one of the given tokens does not exist or is given twice.
    """
    count = max(len(student.tokens), len(teacher.tokens))
    free: list[int] = []
    for number in range(count):
        plain = student.is_ordinary(number), teacher.is_ordinary(number)
        if plain == (False, False):
            free.append(number)
        elif plain != (True, True) or student.token(number) != teacher.token(number):
            return None
    theirs_of = _paired(student, teacher, free, given or {})
    pairs = [(student.token(ours), teacher.token(theirs)) for ours, theirs in theirs_of.items()]
    missing = [student.token(number) for number in sorted(student.text - theirs_of.keys())]
    missing += [teacher.token(one) for one in sorted(teacher.text - set(theirs_of.values()))]
    _pair_rest(theirs_of, free)
    ids = np.arange(count, dtype=np.int32)
    ids[list(theirs_of)] = list(theirs_of.values())
    changed = tuple((ours, theirs) for ours, theirs in pairs if ours != theirs)
    return RoleMap(ids, changed, tuple(missing))


def _paired(
    student: TokenRoles, teacher: TokenRoles, free: Sequence[int], given: Mapping[str, str]
) -> dict[int, int]:
    """Return the teacher's ids of the student's ids that have a role."""
    ours = {student.token(number): number for number in free if student.token(number)}
    theirs = {teacher.token(number): number for number in free if teacher.token(number)}
    theirs_of: dict[int, int] = {}

    def wanted() -> Iterator[tuple[int | None, int | None]]:
        yield from zip(student.ends, teacher.ends, strict=True)
        yield from ((ours[token], theirs.get(token)) for token in ours)

    for token, other in given.items():
        for whose, name, known in (("student", token, ours), ("teacher", other, theirs)):
            if name not in known:
                raise InvalidInput(
                    f"the {whose} has no special token {name!r}",
                    field=FIELD,
                    hint='write "token of the student" = "token of the teacher"',
                )
        if theirs[other] in theirs_of.values():
            raise InvalidInput(
                f"the token {other!r} of the teacher is given twice",
                field=FIELD,
                hint="give each token of the teacher to one token of the student",
            )
        theirs_of[ours[token]] = theirs[other]
    places, unpaired = set(free), set(free) - theirs_of.keys()
    for number, match in wanted():
        if number in unpaired and match in places and match not in theirs_of.values():
            theirs_of[number] = match
            unpaired.remove(number)
    return theirs_of


def _pair_rest(theirs_of: dict[int, int], free: Sequence[int]) -> None:
    """Pair the ids without a role: each with itself, if that is free, else in ascending order."""
    used = set(theirs_of.values())
    theirs_of |= {one: one for one in free if one not in theirs_of and one not in used}
    used = set(theirs_of.values())
    ours = [one for one in free if one not in theirs_of]
    theirs_of |= zip(ours, (one for one in free if one not in used), strict=True)

"""Tokenizers that differ in their special tokens only: which of them have the same role."""

from __future__ import annotations

import numpy as np
import pytest

from clients.alignment.roles import RoleMap, TokenRoles, role_map
from protos.errors import InvalidInput

WORDS = ["a", "b", "c"]


def roles(
    *added: str, text: tuple[str, ...] = (), end: str = "", eos: str = "", words: list[str] = WORDS
) -> TokenRoles:
    """Ordinary tokens, then `added` ones, of which `text` stand for text."""
    tokens = [*words, *added]
    spelled = frozenset(tokens.index(token) for token in text)
    special = frozenset(range(len(words), len(tokens))) - spelled
    ends = tuple(tokens.index(token) if token else -1 for token in (end, eos or end))
    return TokenRoles(tokens, special, spelled, (ends[0], ends[1]))


QWEN = roles("<eot>", "<im_start>", "<im_end>", "<box>", "</box>", end="<im_end>")
DISTILL = roles("<end>", "<User>", "<Assistant>", "<think>", "</think>", end="<end>")


def found(student: TokenRoles, teacher: TokenRoles, given: dict[str, str] | None = None) -> RoleMap:
    made = role_map(student, teacher, given)
    assert made is not None
    assert sorted(made.ids) == list(range(len(made.ids)))
    return made


def test_ends_have_the_same_role() -> None:
    made = found(QWEN, DISTILL)
    assert made.pairs == (("<im_end>", "<end>"),)
    assert made.missing == ()
    # <im_end>, id 5, is <end>, id 3; <eot> gets what is left, and the others keep their ids.
    assert made.ids.tolist() == [0, 1, 2, 5, 4, 3, 6, 7]


def test_the_same_text_at_other_ids() -> None:
    student = roles("<end>", "<tool>", "<think>", text=("<think>",), end="<end>")
    teacher = roles("<think>", "<end>", "<user>", text=("<think>",), end="<end>")
    made = found(student, teacher)
    assert made.ids.tolist() == [0, 1, 2, 4, 5, 3]
    assert (made.pairs, made.missing) == ((), ())


def test_text_without_a_role() -> None:
    teacher = roles("<end>", "<User>", "<Assistant>", "<think>", text=("<think>",), end="<end>")
    student = roles("<eot>", "<im_start>", "<im_end>", "<box>", end="<im_end>")
    assert found(student, teacher).missing == ("<think>",)
    made = found(student, teacher, {"<eot>": "<think>"})
    assert made.missing == ()
    assert made.pairs == (("<eot>", "<think>"), ("<im_end>", "<end>"))
    assert found(teacher, student).missing == ("<think>",)


def test_more_tokens_on_one_side() -> None:
    made = found(roles("<end>", end="<end>"), roles("<x>", "<y>", "<end>", end="<end>"))
    assert made.ids.tolist() == [0, 1, 2, 5, 4, 3]
    assert made.missing == ()


@pytest.mark.parametrize(
    "teacher",
    [
        roles("<end>", words=["a", "b", "d"]),
        roles("<end>", words=["a", "b"]),
        roles(words=["a", "b", "c", "d"]),
    ],
)
def test_other_words_are_another_tokenizer(teacher: TokenRoles) -> None:
    assert role_map(roles("<end>"), teacher) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"<nothing>": "<end>"}, "the student has no special token '<nothing>'"),
        ({"a": "<end>"}, "the student has no special token 'a'"),
        ({"<box>": "<nothing>"}, "the teacher has no special token '<nothing>'"),
        ({"<box>": "<end>", "<eot>": "<end>"}, "'<end>' of the teacher is given twice"),
    ],
)
def test_roles_in_vain(given: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        role_map(QWEN, DISTILL, given)
    assert caught.value.field == "teacher.roles"


def test_what_is_given_comes_first() -> None:
    made = found(QWEN, DISTILL, {"<box>": "<end>", "<im_end>": "<think>"})
    assert made.ids[np.array([6, 5])].tolist() == [3, 6]

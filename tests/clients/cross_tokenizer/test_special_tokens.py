"""Tokenizers that differ only in their special tokens: which special tokens have the same role."""

from __future__ import annotations

import numpy as np
import pytest

from clients.cross_tokenizer.special_tokens import (
    SpecialTokenMap,
    SpecialTokens,
    map_special_tokens,
)
from protos.errors import InvalidInput

WORDS = ["a", "b", "c"]


def build_roles(
    *added: str, text: tuple[str, ...] = (), end: str = "", eos: str = "", words: list[str] = WORDS
) -> SpecialTokens:
    """Ordinary tokens, then `added` tokens; those in `text` are not special."""
    tokens = [*words, *added]
    text_ids = frozenset(tokens.index(token) for token in text)
    special = frozenset(range(len(words), len(tokens))) - text_ids
    end_ids = tuple(tokens.index(token) if token else -1 for token in (end, eos or end))
    return SpecialTokens(tokens, special, text_ids, (end_ids[0], end_ids[1]))


QWEN = build_roles("<eot>", "<im_start>", "<im_end>", "<box>", "</box>", end="<im_end>")
DISTILL = build_roles("<end>", "<User>", "<Assistant>", "<think>", "</think>", end="<end>")


def checked_role_map(
    student: SpecialTokens, teacher: SpecialTokens, configured_roles: dict[str, str] | None = None
) -> SpecialTokenMap:
    token_map = map_special_tokens(student, teacher, configured_roles)
    assert token_map is not None
    assert sorted(token_map.ids) == list(range(len(token_map.ids)))
    return token_map


def test_ends_have_the_same_role() -> None:
    token_map = checked_role_map(QWEN, DISTILL)
    assert token_map.pairs == (("<im_end>", "<end>"),)
    assert token_map.missing == ()
    # <im_end>, id 5, is <end>, id 3; <eot> gets the remaining id, and the others keep their ids.
    assert token_map.ids.tolist() == [0, 1, 2, 5, 4, 3, 6, 7]


def test_the_same_text_at_other_ids() -> None:
    student = build_roles("<end>", "<tool>", "<think>", text=("<think>",), end="<end>")
    teacher = build_roles("<think>", "<end>", "<user>", text=("<think>",), end="<end>")
    token_map = checked_role_map(student, teacher)
    assert token_map.ids.tolist() == [0, 1, 2, 4, 5, 3]
    assert (token_map.pairs, token_map.missing) == ((), ())


def test_text_without_a_role() -> None:
    teacher = build_roles(
        "<end>", "<User>", "<Assistant>", "<think>", text=("<think>",), end="<end>"
    )
    student = build_roles("<eot>", "<im_start>", "<im_end>", "<box>", end="<im_end>")
    assert checked_role_map(student, teacher).missing == ("<think>",)
    token_map = checked_role_map(student, teacher, {"<eot>": "<think>"})
    assert token_map.missing == ()
    assert token_map.pairs == (("<eot>", "<think>"), ("<im_end>", "<end>"))
    assert checked_role_map(teacher, student).missing == ("<think>",)


def test_more_tokens_on_one_side() -> None:
    token_map = checked_role_map(
        build_roles("<end>", end="<end>"), build_roles("<x>", "<y>", "<end>", end="<end>")
    )
    assert token_map.ids.tolist() == [0, 1, 2, 5, 4, 3]
    assert token_map.missing == ()


@pytest.mark.parametrize(
    "teacher",
    [
        build_roles("<end>", words=["a", "b", "d"]),
        build_roles("<end>", words=["a", "b"]),
        build_roles(words=["a", "b", "c", "d"]),
    ],
)
def test_other_words_are_another_tokenizer(teacher: SpecialTokens) -> None:
    assert map_special_tokens(build_roles("<end>"), teacher) is None


@pytest.mark.parametrize(
    ("configured_roles", "message"),
    [
        ({"<nothing>": "<end>"}, "the student has no special token '<nothing>'"),
        ({"a": "<end>"}, "the student has no special token 'a'"),
        ({"<box>": "<nothing>"}, "the teacher has no special token '<nothing>'"),
        ({"<box>": "<end>", "<eot>": "<end>"}, "'<end>' of the teacher is given twice"),
    ],
)
def test_roles_in_vain(configured_roles: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        map_special_tokens(QWEN, DISTILL, configured_roles)
    assert caught.value.field == "teacher.roles"


def test_what_is_given_comes_first() -> None:
    token_map = checked_role_map(QWEN, DISTILL, {"<box>": "<end>", "<im_end>": "<think>"})
    assert token_map.ids[np.array([6, 5])].tolist() == [3, 6]

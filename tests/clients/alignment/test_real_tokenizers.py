"""Tokenizers of real models: shares of one-to-one tokens, round trips, speed."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.alignment.alignment import Aligner
from clients.alignment.byte_tokenizer import ByteTokenizer, tokenizer_in
from clients.alignment.report import kind_of, measure_shares
from tests.real_tokenizers import fetch_tokenizer

pytestmark = pytest.mark.slow

NAMES = ("llama3_2", "qwen3", "gemma3", "deepseek_v3", "mistral_nemo", "gpt2")
PROSE = """\
The keeper of the lighthouse had lived alone by the sea for forty years. Every evening he climbed
the narrow stairs, lit the lamp, and wrote a few lines about the weather into his book. Nobody had
asked him to do so; it was simply what his father had done before him. When the harbour was closed
and the ships no longer came, he went on writing, because a habit that old is a kind of company.
"""
CODE = '''\
def merge(left: list[int], right: list[int]) -> list[int]:
    """Merge two sorted lists."""
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]
'''
MATHS = """\
Natalia sold 48 clips in April and 48 / 2 = 24 in May, so 48 + 24 = 72. If x^2 + 315x = 7826 then
x = (-315 + sqrt(315^2 + 4 * 7826)) / 2 = (-315 + 361.28) / 2 = 23.14. A price of $1,250.75 with
8.25% tax is $1,250.75 * 1.0825 = $1,353.94, and 12345 * 6789 = 83810205.
"""
TEXTS = {"prose": PROSE, "code": CODE, "maths": MATHS}
# Student, teacher: shares in prose, code and maths, of these texts.
SHARES = {
    ("llama3_2", "qwen3"): (1.0, 1.0, 0.78),
    ("qwen3", "llama3_2"): (1.0, 1.0, 0.58),
    ("gemma3", "qwen3"): (0.96, 0.44, 0.98),
    ("qwen3", "gemma3"): (0.95, 0.55, 0.98),
    ("qwen3", "deepseek_v3"): (0.96, 1.0, 0.58),
    ("llama3_2", "mistral_nemo"): (1.0, 1.0, 0.78),
    ("gpt2", "llama3_2"): (0.97, 0.29, 0.72),
    ("mistral_nemo", "gemma3"): (0.95, 0.55, 0.98),
}
OTHERS = {
    "emoji": "\U0001f600\U0001f469\u200d\U0001f467 \u2764\ufe0f\U0001f1e9\U0001f1ea!",
    "arabic": "\u0645\u0631\u062d\u0628\u0627 \u0628\u0643\u060c \u0643\u064a\u0641\u061f",
    "cjk": "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u30ab\u30bf\u3068\u6f22\u5b57\u3001\ud55c\uad6d",
}
ALPHABET = st.sampled_from([*PROSE, *CODE, *MATHS, *"".join(OTHERS.values())])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizers")
    for name in NAMES:
        fetch_tokenizer(name, root / name)
    return root


@cache
def tokenizer(directory: Path, name: str) -> ByteTokenizer:
    return tokenizer_in(directory / name, name, "teacher.tokenizer")


def aligner(directory: Path, pair: tuple[str, str]) -> Aligner:
    return Aligner(*(tokenizer(directory, name) for name in pair), 0)


def test_shares_of_one_to_one_tokens(directory: Path) -> None:
    found = {}
    for pair in SHARES:
        of = aligner(directory, pair)
        shares = [measure_shares(of, [text]) for text in TEXTS.values()]
        found[pair] = tuple(round(one.one_to_one, 2) for one in shares)
        assert not any(one.left_out for one in shares)
    for pair, of_pair in found.items():
        print(f"{pair[0]} from {pair[1]}: {of_pair}")
    assert found == {pair: pytest.approx(of_pair, abs=0.01) for pair, of_pair in SHARES.items()}
    assert [kind_of(text) for text in TEXTS.values()] == list(TEXTS)


@settings(deadline=None, max_examples=150)
@given(st.text(ALPHABET, max_size=60), st.sampled_from(NAMES), st.sampled_from(NAMES))
def test_round_trips(directory: Path, text: str, student: str, teacher: str) -> None:
    of = aligner(directory, (student, teacher))
    ids = of.writer.encode(text)
    if of.writer.data(ids) != text.encode():
        assert student == "qwen3"  # NFC
        return
    found = of.align(ids, has_end=False)
    if found is None:
        assert teacher == "qwen3" or not text
        return
    assert found.data == text.encode() == of.reader.data(found.reader_ids)
    assert found.canonical.all()
    if student == teacher:
        assert found.one_to_one.all()


@settings(deadline=None, max_examples=150)
@given(st.data(), st.sampled_from(NAMES), st.sampled_from(NAMES))
def test_tokens_that_are_no_text(
    directory: Path, data: st.DataObject, student: str, teacher: str
) -> None:
    """Any ids: broken UTF-8 becomes tokens of bytes, and nothing is lost."""
    of = aligner(directory, (student, teacher))
    one_id = st.integers(0, 5000)
    ids = np.array(data.draw(st.lists(one_id, min_size=1, max_size=20)), np.int32)
    found = of.align(ids, has_end=False)
    if found is None:
        return
    whole = of.writer.data(ids[: found.read.sum()])
    assert found.data.startswith(whole)
    assert of.reader.data(found.reader_ids) == found.data


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [*TEXTS, *OTHERS])
def test_what_follows_a_word_does_not_change_it(directory: Path, name: str, kind: str) -> None:
    """The tokens before the last word that has begun, at every prefix of a text."""
    of, text = tokenizer(directory, name), (TEXTS | OTHERS)[kind]
    whole = of.encode(text)
    ends = of.ends(whole)
    for length in range(1, min(len(text), 400)):
        before = text[:length].encode()
        begun = max(
            (
                i
                for i in range(1, len(before))
                if before[i : i + 1].isspace() and not before[i - 1 : i].isspace()
            ),
            default=0,
        )
        fixed = int((ends <= begun).sum())
        assert of.encode(text[:length])[:fixed].tolist() == whole[:fixed].tolist()


def test_speed(directory: Path) -> None:
    """A figure to read; a machine that is busy is no failure."""
    of = aligner(directory, ("llama3_2", "qwen3"))
    ids = of.writer.encode(PROSE + CODE + MATHS)
    started, count = time.thread_time(), 0
    while count < 50_000:
        of.align(ids, has_end=False)
        count += len(ids)
    print(f"{count / (time.thread_time() - started):,.0f} tokens/s of encoding and alignment")

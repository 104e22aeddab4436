"""Tokenizers of real models: shares of one-to-one tokens, round trips, speed."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.cross_tokenizer.alignment import Aligner, measure_shares
from clients.cross_tokenizer.byte_tokenizer import ByteTokenizer, tokenizer_in
from clients.plan.pair import kind_of
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
# (student, teacher): expected shares for the prose, code and maths texts.
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
OTHER_TEXTS = {
    "emoji": "\U0001f600\U0001f469\u200d\U0001f467 \u2764\ufe0f\U0001f1e9\U0001f1ea!",
    "arabic": "\u0645\u0631\u062d\u0628\u0627 \u0628\u0643\u060c \u0643\u064a\u0641\u061f",
    "cjk": "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u30ab\u30bf\u3068\u6f22\u5b57\u3001\ud55c\uad6d",
}
ALPHABET = st.sampled_from([*PROSE, *CODE, *MATHS, *"".join(OTHER_TEXTS.values())])


@pytest.fixture(scope="module")
def tokenizers_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizers")
    for name in NAMES:
        fetch_tokenizer(name, root / name)
    return root


@cache
def load_tokenizer(tokenizers_directory: Path, name: str) -> ByteTokenizer:
    return tokenizer_in(tokenizers_directory / name, name, "teacher.tokenizer")


def build_aligner(tokenizers_directory: Path, pair: tuple[str, str]) -> Aligner:
    return Aligner(*(load_tokenizer(tokenizers_directory, name) for name in pair), 0)


def test_shares_of_one_to_one_tokens(tokenizers_directory: Path) -> None:
    measured_shares = {}
    for pair in SHARES:
        aligner = build_aligner(tokenizers_directory, pair)
        shares = [measure_shares(aligner, [text]) for text in TEXTS.values()]
        measured_shares[pair] = tuple(round(share.one_to_one, 2) for share in shares)
        assert not any(share.left_out for share in shares)
    for pair, pair_shares in measured_shares.items():
        print(f"{pair[0]} from {pair[1]}: {pair_shares}")
    assert measured_shares == {
        pair: pytest.approx(pair_shares, abs=0.01) for pair, pair_shares in SHARES.items()
    }
    assert [kind_of(text) for text in TEXTS.values()] == list(TEXTS)


@settings(deadline=None, max_examples=150)
@given(st.text(ALPHABET, max_size=60), st.sampled_from(NAMES), st.sampled_from(NAMES))
def test_round_trips(tokenizers_directory: Path, text: str, student: str, teacher: str) -> None:
    aligner = build_aligner(tokenizers_directory, (student, teacher))
    ids = aligner.writer.encode(text)
    if aligner.writer.data(ids) != text.encode():
        assert student == "qwen3"  # its normalizer (NFC) changed the text
        return
    alignment = aligner.align(ids, has_end=False)
    if alignment is None:
        assert teacher == "qwen3" or not text
        return
    assert alignment.data == text.encode() == aligner.reader.data(alignment.reader_ids)
    assert alignment.canonical.all()
    if student == teacher:
        assert alignment.one_to_one.all()


@settings(deadline=None, max_examples=150)
@given(st.data(), st.sampled_from(NAMES), st.sampled_from(NAMES))
def test_tokens_that_are_no_text(
    tokenizers_directory: Path, data: st.DataObject, student: str, teacher: str
) -> None:
    """Any ids: broken UTF-8 becomes tokens of bytes, and nothing is lost."""
    aligner = build_aligner(tokenizers_directory, (student, teacher))
    token_ids = st.integers(0, 5000)
    ids = np.array(data.draw(st.lists(token_ids, min_size=1, max_size=20)), np.int32)
    alignment = aligner.align(ids, has_end=False)
    if alignment is None:
        return
    read_bytes = aligner.writer.data(ids[: alignment.read.sum()])
    assert alignment.data.startswith(read_bytes)
    assert aligner.reader.data(alignment.reader_ids) == alignment.data


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [*TEXTS, *OTHER_TEXTS])
def test_what_follows_a_word_does_not_change_it(
    tokenizers_directory: Path, name: str, kind: str
) -> None:
    """For every prefix of a text, the tokens before its last word are those of the whole text."""
    tokenizer, text = load_tokenizer(tokenizers_directory, name), (TEXTS | OTHER_TEXTS)[kind]
    all_ids = tokenizer.encode(text)
    ends = tokenizer.ends(all_ids)
    for length in range(1, min(len(text), 400)):
        prefix = text[:length].encode()
        last_word_start = max(
            (
                i
                for i in range(1, len(prefix))
                if prefix[i : i + 1].isspace() and not prefix[i - 1 : i].isspace()
            ),
            default=0,
        )
        fixed_count = int((ends <= last_word_start).sum())
        assert (
            tokenizer.encode(text[:length])[:fixed_count].tolist() == all_ids[:fixed_count].tolist()
        )


def test_speed(tokenizers_directory: Path) -> None:
    """Prints the speed and asserts nothing, because the machine may be busy."""
    aligner = build_aligner(tokenizers_directory, ("llama3_2", "qwen3"))
    ids = aligner.writer.encode(PROSE + CODE + MATHS)
    start_seconds, count = time.thread_time(), 0
    while count < 50_000:
        aligner.align(ids, has_end=False)
        count += len(ids)
    print(f"{count / (time.thread_time() - start_seconds):,.0f} tokens/s of encoding and alignment")

"""Tokenizers trained for the tests: byte-level BPE, and BPE with byte fallback."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from clients.cross_tokenizer.byte_tokenizer import ByteTokenizer

END = "<|end|>"
TEXT = (
    "the cat sat on the mat and the other cat sat there too. 12 + 34 = 46, so 46 - 12 = 34.\n"
    "def add(one, other):\n    return one + other\n\n"
    "na\u00efve caf\u00e9 \u4f60\u597d \U0001f600\n"
) * 4


def byte_level(size: int, text: str = TEXT) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def byte_fallback(size: int, text: str = TEXT, *, first_space: bool = False) -> Tokenizer:
    """Train as SentencePiece does: spaces are marked; characters without a token become bytes.

    `first_space`: prepend a space to each text, as Llama 2 does.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    marks: list[Any] = [normalizers.Replace(" ", "\u2581")]
    if first_space:
        marks.insert(0, normalizers.Prepend("\u2581"))
    tokenizer.normalizer = normalizers.Sequence(marks)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = ["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256))]
    ascii_text = text.encode("ascii", "ignore").decode()
    tokenizer.train_from_iterator(
        ascii_text.split("\n"),
        trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False),
    )
    document = json.loads(tokenizer.to_str())
    for token in document["added_tokens"]:
        token["special"] = token["content"] in ("<unk>", END)
    document["added_tokens"] = [token for token in document["added_tokens"] if token["special"]]
    return Tokenizer.from_str(json.dumps(document))


def as_bytes(tokenizer: Tokenizer) -> ByteTokenizer:
    return ByteTokenizer(json.loads(tokenizer.to_str()), "student", "student.model")

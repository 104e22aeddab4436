"""The text of an answer is what the model wrote."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from clients.data.prompt_format import PromptFormat
from clients.data.tokens.tokenizer import answer_text
from tests.student_trainer import tiny

TOKENS = ["<s>", "</s>", "<think>", "</think>", "x", " ,", " y", " !", "12", "7"]


@pytest.fixture
def words() -> Any:
    """A tokenizer that cleans up spaces, as Llama 3's does, with tags that are special tokens."""
    backend = Tokenizer(models.WordLevel({t: i for i, t in enumerate(TOKENS)}, unk_token="x"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<think>", "</think>"],
        clean_up_tokenization_spaces=True,
    )


@pytest.mark.parametrize(
    ("written", "has_end", "text"),
    [
        (["x", " ,", " y", " !", "</s>"], True, "x , y !"),
        (["<think>", "12", "</think>", "7", "</s>"], True, "<think>12</think>7"),
        (["7", "</think>"], False, "7</think>"),
        (["12", "7"], True, "12"),  # an end of generation_config that the tokenizer does not name
        ([], False, ""),
    ],
)
def test_answers(words: Any, written: list[str], has_end: bool, text: str) -> None:
    ids = [TOKENS.index(token) for token in written]
    assert answer_text(words, ids, has_end=has_end) == text


def test_a_start_token_stands_once() -> None:
    """Also where the text begins with the one that the tokenizer adds."""
    words = tiny.tokenizer()
    words.add_special_tokens({"bos_token": "<s>"})
    start = words.bos_token_id
    plain = words("1+1=", add_special_tokens=False)["input_ids"]

    def with_start(text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [start, *words(text, **options)["input_ids"]]}

    class Adding:
        bos_token_id, eos_token_id, chat_template = start, words.eos_token_id, None
        __call__ = staticmethod(with_start)

    form = PromptFormat()
    for text in ("1+1=", "<s>1+1="):
        assert form.ids(Adding(), form.conversation_of_text(text)) == [start, *plain]

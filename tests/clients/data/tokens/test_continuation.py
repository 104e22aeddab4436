"""An answer after its prompt: the text of both is that of the two, whatever the tokenizer adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from clients.data.conversation import Conversation
from clients.data.prompt_format import PromptFormat
from clients.data.tokens.answers import answered_ids, completion_ids
from clients.data.tokens.continuation import continuation_ids
from tests.clients.cross_tokenizer.trained import END, TEXT, byte_fallback, byte_level


def metaspace(scheme: str) -> Tokenizer:
    made = byte_fallback(400)
    made.normalizer = None  # type: ignore[assignment]
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    spaces = decoders.Metaspace(prepend_scheme=scheme, split=False)
    made.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse()])
    return made


def with_prefix_space() -> Tokenizer:
    made = byte_level(400)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": lambda: byte_level(400),
    "byte level with a prefix space": with_prefix_space,
    "Prepend": lambda: byte_fallback(400, first_space=True),
    "Metaspace first": lambda: metaspace("first"),
    "Metaspace always": lambda: metaspace("always"),
    "Metaspace never": lambda: metaspace("never"),
}
PAIRS = [
    ("17+25=", "42"),
    ("the cat", " sat"),
    ("a\n", "def add"),
    ("x = ", "  46"),
    ("na", "\u00efve"),
]


@pytest.fixture(params=KINDS)
def words(request: pytest.FixtureRequest) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=KINDS[request.param](), eos_token=END)


def text_of(words: Any, ids: list[int]) -> str:
    """Without the space that the tokenizer puts before a text that it encodes."""
    return str(words.decode(ids, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize(("prompt", "answer"), PAIRS)
def test_prompt_and_answer_are_the_text_of_both(words: Any, prompt: str, answer: str) -> None:
    before = words(prompt, add_special_tokens=False)["input_ids"]
    after = completion_ids(PromptFormat(), words, answer)
    assert after[-1] == words.eos_token_id
    assert text_of(words, before + after[:-1]) == text_of(words, before) + answer


def test_the_answer_of_a_conversation(words: Any) -> None:
    words.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}{% if m.role == 'assistant' %}"
        + END
        + "{% else %}\n{% endif %}{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
    )
    talk = Conversation(
        ({"role": "user", "content": "17+25="}, {"role": "assistant", "content": "42"})
    )
    before, after = answered_ids(PromptFormat(messages_column="m"), words, talk, "row 1")
    assert after[-1] == words.eos_token_id
    assert text_of(words, before + after[:-1]) == text_of(words, before) + "42"


def test_names_of_special_tokens_in_passages_are_text(words: Any) -> None:
    end = words.eos_token_id
    assert end in continuation_ids(words, f"a {END} b")
    assert end not in continuation_ids(words, f"a {END} b", split_special_tokens=True)
    assert end in continuation_ids(words, f"a {END} b"), "the next call is as the first"


def test_a_tokenizer_that_adds_nothing_is_used_itself() -> None:
    words = PreTrainedTokenizerFast(tokenizer_object=byte_level(400), eos_token=END)
    assert continuation_ids(words, TEXT) == words(TEXT, add_special_tokens=False)["input_ids"]


def test_private_characters_hide_no_control_token(words: Any) -> None:
    """A passage with an icon of a font, which resembles a placeholder, stays plain text."""
    ids = continuation_ids(words, f"a {END} \U000f0000", split_special_tokens=True)
    assert words.eos_token_id not in ids

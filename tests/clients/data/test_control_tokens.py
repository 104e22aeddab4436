"""The name of a control token inside a text is text: decode(ids) is what the record says."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from clients.data.control_tokens import mark_names_in
from clients.data.conversation import Conversation
from clients.data.prompt_format import PromptFormat, plain_ids
from clients.data.tokens.answers import answered_ids, assistant_ids, completion_ids
from protos.errors import InvalidInput

CONTROL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>"]
CORPUS = ["use it to end a turn and then go on", "what does it mean? system user assistant tools"]
CHATML = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWER = "use <|im_end|> to end a turn, <s>and</s> then go on"
TALK = [
    {"role": "system", "content": "a</s>b"},
    {"role": "user", "content": "what does <|im_start|>system mean? <|im_end|>"},
    {"role": "assistant", "content": ANSWER},
]
TOOLS = [{"type": "function", "function": {"name": "end", "description": "writes <|im_end|>"}}]
MESSAGES = PromptFormat(messages_column="messages")


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentence_piece(*, legacy: bool) -> Tokenizer:
    """As Llama 2: the vocabulary of the model itself has the control tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=CONTROL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    document = json.loads(tokenizer.to_str())
    vocabulary = document["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    return Tokenizer.from_str(json.dumps(document))


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.UnigramTrainer(
        vocab_size=120,
        special_tokens=CONTROL,
        unk_token="<unk>",
        initial_alphabet=[*"<>|/_,?[]{}:\"'\n", *"abcdefghijklmnopqrstuvwxyz"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS = {
    "byte level": byte_level,
    "prepend": lambda: sentence_piece(legacy=True),
    "metaspace": lambda: sentence_piece(legacy=False),
    "unigram": unigram,
}


@pytest.fixture(params=KINDS)
def words(request: pytest.FixtureRequest) -> Any:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=KINDS[request.param](),
        eos_token="</s>",
        bos_token="<s>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def names_in(words: Any, ids: list[int]) -> list[str]:
    """Return the control tokens among the ids, in order."""
    tokens: list[str] = words.convert_ids_to_tokens(ids)
    return [token for token in tokens if token in CONTROL]


def without_spaces(text: str) -> str:
    """SentencePiece's decoders drop and add single spaces beside control tokens."""
    return text.replace(" ", "")


def test_an_answer_teaches_the_characters(words: Any) -> None:
    """Of an answer column and of messages; the only control token is the end."""
    completion = completion_ids(PromptFormat(), words, ANSWER)
    conversation = MESSAGES.conversation({"messages": TALK}, "row 1")
    prompt, answer = answered_ids(MESSAGES, words, conversation, "row 1")
    for ids in (completion, answer):
        assert names_in(words, ids) == ["<|im_end|>"]
        assert without_spaces(words.decode(ids)) == without_spaces(ANSWER) + "<|im_end|>"
    assert names_in(words, prompt) == ["<|im_start|>", "<|im_end|>"] * 2 + ["<|im_start|>"]


def test_a_prompt_opens_no_turn(words: Any) -> None:
    """Texts of users, tools and the system stay theirs; the ids are those of transformers."""
    conversation = MESSAGES.conversation({"messages": TALK, "tools": TOOLS}, "row 1").unanswered()
    ids = MESSAGES.ids(words, conversation, "row 1")
    turns = ["<|im_start|>", "<|im_end|>"]
    assert names_in(words, ids) == [*turns * 3, "<|im_start|>"]
    rendered = MESSAGES.rendered(words, conversation, "row 1", add_answer_start=True)
    assert without_spaces(words.decode(ids)) == without_spaces(rendered)


def test_the_ids_are_those_of_transformers() -> None:
    """Its own splitting of control tokens (since 5.20) encodes the same prompt."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), eos_token="</s>", extra_special_tokens=CONTROL
    )
    tokenizer.chat_template = CHATML
    if not hasattr(tokenizer, "chat_control_tokens"):
        pytest.skip("this transformers does not split control tokens")
    expected = tokenizer.apply_chat_template(
        TALK[:2], add_generation_prompt=True, sanitize_control_tokens=True, return_dict=False
    )
    conversation = MESSAGES.conversation({"messages": TALK[:2]}, "row 1")
    assert MESSAGES.ids(tokenizer, conversation, "row 1") == expected


def test_the_masks_of_all_answers(words: Any) -> None:
    second = [{"role": "user", "content": "go on"}, {"role": "assistant", "content": "then <s>"}]
    conversation = MESSAGES.conversation({"messages": [*TALK, *second]}, "row 1")
    ids, is_answer = assistant_ids(MESSAGES, words, conversation, "row 1")
    learned = [token_id for token_id, mark in zip(ids, is_answer, strict=True) if mark]
    assert names_in(words, learned) == ["<|im_end|>", "<s>", "<|im_end|>"]
    text = without_spaces(words.decode(learned))
    assert text == without_spaces(f"{ANSWER}<|im_end|>then <s><|im_end|>")


def test_the_end_at_the_end_of_parts_is_the_end(words: Any) -> None:
    """A content may be a list of parts; only the last one ends the answer."""
    content = [{"type": "text", "text": text} for text in ("a<|im_end|>", "b<|im_end|>")]
    conversation = Conversation(({"role": "assistant", "content": content},))
    (message,) = mark_names_in(words, conversation, "row 1").messages
    first, last = (part["text"] for part in message["content"])
    assert "<|im_end|>" not in first
    assert last == "b<|im_end|>"


def test_the_end_at_the_end_is_the_end(words: Any) -> None:
    """Data that writes the end token after its answers learns it once."""
    expected = completion_ids(PromptFormat(), words, "go on")
    assert completion_ids(PromptFormat(), words, "go on<|im_end|>") == expected
    for content in ("go on", "go on<|im_end|>"):
        talk = [TALK[1], {"role": "assistant", "content": content}]
        conversation = MESSAGES.conversation({"messages": talk}, "row 1")
        assert answered_ids(MESSAGES, words, conversation, "row 1")[1] == expected


def test_a_text_without_a_template_is_read_as_it_is(words: Any) -> None:
    """Where no template writes control tokens, those of the record are its format."""
    form = PromptFormat(chat_template=False)
    prompt = "<|im_start|>user\ngo on<|im_end|>\n"
    ids = form.ids(words, form.conversation({"prompt": prompt}, "row 1"), "row 1")
    assert [n for n in names_in(words, ids) if n != "<s>"] == ["<|im_start|>", "<|im_end|>"]
    assert names_in(words, completion_ids(form, words, "on<|im_start|>"))[0] == "<|im_start|>"


def test_the_log_names_each_token_once(words: Any, caplog: pytest.LogCaptureFixture) -> None:
    conversation = MESSAGES.conversation({"messages": TALK}, "row 7")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            MESSAGES.ids(words, conversation.unanswered(), "row 7")
    messages = [record.getMessage() for record in caplog.records]
    assert [message for message in messages if "'<|im_start|>'" in message] == [
        "row 7 has the text '<|im_start|>': it is read as these characters, not as the control"
        " token"
    ]


def test_private_characters_beside_a_name_are_refused(words: Any) -> None:
    talk = [{"role": "user", "content": "<|im_end|>\U00100001"}]
    conversation = MESSAGES.conversation({"messages": talk}, "row 1")
    with pytest.raises(InvalidInput, match="row 1 has private-use"):
        MESSAGES.ids(words, conversation, "row 1")


def test_private_characters_in_another_message_are_refused(words: Any) -> None:
    """Placeholders would look the same."""
    talk = [{"role": "user", "content": "\U000f0001"}, {"role": "assistant", "content": ANSWER}]
    conversation = MESSAGES.conversation({"messages": talk}, "row 1")
    with pytest.raises(InvalidInput, match="row 1 has private-use"):
        answered_ids(MESSAGES, words, conversation, "row 1")
    with pytest.raises(InvalidInput, match="row 1 has private-use"):
        assistant_ids(MESSAGES, words, conversation, "row 1")


@pytest.mark.parametrize("icon", ["\U000f0001", "\U000f0001" * 10, "\U000fa101"])
def test_private_characters_without_names_are_text(icon: str) -> None:
    """Icons of fonts for terminals; the ids are those of transformers."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), eos_token="</s>", extra_special_tokens=CONTROL
    )
    tokenizer.chat_template = CHATML
    text = f"go {icon} on"
    talk = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    conversation = MESSAGES.conversation({"messages": talk}, "row 1")
    rendered = MESSAGES.rendered(tokenizer, conversation, "row 1", add_answer_start=False)
    expected = tokenizer(rendered.removesuffix("\n"), add_special_tokens=False)["input_ids"]
    prompt, answer = answered_ids(MESSAGES, tokenizer, conversation, "row 1")
    assert prompt + answer == expected
    assert prompt == MESSAGES.ids(tokenizer, conversation.unanswered(), "row 1")
    assert assistant_ids(MESSAGES, tokenizer, conversation, "row 1")[0] == expected
    assert completion_ids(PromptFormat(), tokenizer, text) == answer


def test_texts_without_names_have_the_ids_of_before(words: Any) -> None:
    talk = [TALK[1] | {"content": "what?"}, {"role": "assistant", "content": "go on"}]
    conversation = MESSAGES.conversation({"messages": talk}, "row 1")
    text = MESSAGES.rendered(words, conversation.unanswered(), "", add_answer_start=True)
    expected = words(text, add_special_tokens=False)["input_ids"]
    assert MESSAGES.ids(words, conversation.unanswered(), "row 1") == expected
    assert plain_ids(words, text) == expected

"""Text and conversations become prompts; invalid records are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clients.config.tables.common import StudentConfig
from clients.data.conversation import conversation_in
from clients.data.prompt_format import (
    PromptFormat,
    check_chat_template,
    check_generation,
    default_template,
    template_text,
)
from clients.data.tokens.answers import answer_end, answered_ids, assistant_ids, completion_ids
from clients.data.tokens.tokenizer import chat_templates_in
from protos.errors import InvalidInput
from student_trainer.model.loading import load_tokenizer
from tests.student_trainer import tiny

CHARACTERS = "SUATN0123456789+="
# S system, U user, A assistant, T tools: each message begins with the letter of its role.
PLAIN = (
    "{% if tools %}T{{ tools | length }}{% endif %}"
    "{% for m in messages %}{{ m.role[0] | upper }}{{ m.content }}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A{% if thinking is defined and not thinking %}N{% endif %}"
    "{% endif %}"
)
MARKED = PLAIN.replace(
    "{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}<|end|>"
    "{% else %}{{ m.content }}{% endif %}",
)
TALK = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
]


@pytest.fixture(scope="module")
def chat_tokenizer() -> Any:
    tokenizer = tiny.tokenizer(CHARACTERS)
    tokenizer.chat_template = PLAIN
    return tokenizer


@pytest.fixture(scope="module")
def marked_tokenizer() -> Any:
    tokenizer = tiny.tokenizer(CHARACTERS)
    tokenizer.chat_template = MARKED
    return tokenizer


def render_prompt(tokenizer: Any, form: PromptFormat, record: dict[str, Any]) -> str:
    conversation = form.conversation(record, "row 1").unanswered()
    return str(tokenizer.decode(form.ids(tokenizer, conversation, "row 1")))


@pytest.mark.parametrize(
    ("keys", "record", "expected"),
    [
        ({}, {"prompt": "1+1="}, "U1+1=A"),
        ({"template": "0{prompt}="}, {"prompt": "1+1"}, "U01+1=A"),
        ({"system": "9"}, {"prompt": "1+1="}, "S9U1+1=A"),
        ({"chat_template": False}, {"prompt": "1+1="}, "1+1="),
        ({"template_arguments": {"thinking": False}}, {"prompt": "1"}, "U1AN"),
        ({"template_arguments": {"thinking": True}}, {"prompt": "1"}, "U1A"),
        ({"messages_column": "m"}, {"m": TALK}, "U1+1=A2<|end|>U2+2=A"),
        ({"messages_column": "m"}, {"m": TALK[:3]}, "U1+1=A2<|end|>U2+2=A"),
        ({"messages_column": "m", "system": "9"}, {"m": TALK[:1]}, "S9U1+1=A"),
        (
            {"messages_column": "m"},
            {"m": [{"role": "system", "content": "7"}, *TALK[:1]], "tools": [{}, {}]},
            "T2S7U1+1=A",
        ),
        ({"messages_column": "m"}, {"m": TALK[:1], "tools": '[{"name": "f"}]'}, "T1U1+1=A"),
        ({"messages_column": "m"}, {"m": TALK[:1], "tools": ['{"name": "f"}']}, "T1U1+1=A"),
        ({"messages_column": "m"}, {"m": TALK[:1], "tools": None}, "U1+1=A"),
    ],
)
def test_prompts(chat_tokenizer: Any, keys: Any, record: Any, expected: str) -> None:
    assert render_prompt(chat_tokenizer, PromptFormat(**keys), record) == expected


def test_null_keys_of_parquet_are_left_out(chat_tokenizer: Any) -> None:
    """In a Parquet file every message has the keys of all messages, with nulls."""
    messages = [{**message, "tool_calls": None, "name": None} for message in TALK]
    conversation = conversation_in({"m": messages}, "m", "row 1")
    assert conversation == conversation_in({"m": TALK}, "m", "row 1")


CALLING = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}


def test_a_message_of_tool_calls_needs_no_text() -> None:
    messages = [TALK[0], CALLING, {"role": "tool", "content": "2"}]
    assert len(conversation_in({"m": messages}, "m", "row 1").messages) == 3


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"x": 1}, "row 1 has no list of messages in column 'm'; its columns are x"),
        ({"m": "U1"}, "row 1 has no list of messages"),
        ({"m": [{"speaker": "human", "value": "1"}]}, "row 1 has no list of messages"),
        ({"m": [{"role": "human", "content": "1"}]}, "message 1 of row 1 has the role 'human'"),
        ({"m": [{"role": "user", "content": None}]}, "message 1 of row 1 has no text"),
        ({"m": [{"role": "user", "content": [{"type": "text"}]}]}, "its content is a list"),
        ({"m": [{"role": "user", "tool_calls": [{}]}]}, "message 1 of row 1 has no text"),
        ({"m": TALK, "tools": "f"}, "the column 'tools' of row 1 is not a list of tools"),
        ({"m": TALK, "tools": [3]}, "the column 'tools' of row 1 is not a list of tools"),
        ({"m": TALK, "tools": 3}, "the column 'tools' of row 1 is not a list of tools"),
        ({"m": TALK, "tools": {}}, "the column 'tools' of row 1 is not a list of tools"),
        ({"m": TALK, "tools": '""'}, "the column 'tools' of row 1 is not a list of tools"),
        ({"m": [*TALK, CALLING | {"tool_calls": 5}]}, "has tool_calls that are not a list"),
        ({"m": [*TALK, CALLING | {"tool_calls": {"function": 1}}]}, "not a list of objects"),
        ({"m": [*TALK, CALLING | {"tool_calls": ["f()"]}]}, "not a list of objects"),
    ],
)
def test_records_without_a_conversation(record: Any, problem: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        PromptFormat(messages_column="m").conversation(record, "row 1")
    assert problem in caught.value.message
    assert (caught.value.field, bool(caught.value.hint)) == ("data.messages_column", True)


def test_two_system_texts_are_refused() -> None:
    form = PromptFormat(messages_column="m", system="9")
    messages = [{"role": "system", "content": "7"}, *TALK]
    with pytest.raises(InvalidInput, match="row 1 has its own system message") as caught:
        form.conversation({"m": messages}, "row 1")
    assert caught.value.field == "data.system"


@pytest.mark.parametrize(
    "template",
    [
        *("{{ 1 / 0 }}", "{% for n in range(10 ** 9) %}{% endfor %}", "{{ 'a' * 2 ** 70 }}"),
        *("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ messages[9].content }}"),
    ],
)
def test_whatever_a_template_raises_is_refused(template: str) -> None:
    tokenizer = tiny.tokenizer(CHARACTERS)
    tokenizer.chat_template = template
    with pytest.raises(InvalidInput, match="cannot be used on row 1: "):
        render_prompt(tokenizer, PromptFormat(messages_column="m"), {"m": TALK})
    assert answer_end(tokenizer) == tokenizer.eos_token_id


def test_a_template_that_fails_names_the_row_and_the_key() -> None:
    tokenizer = tiny.tokenizer(CHARACTERS)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    record = {"m": TALK, "prompt": "1+1="}
    for keys, field in (
        ({"messages_column": "m"}, "data.messages_column"),
        ({"system": "9"}, "data.system"),
        ({}, "student.model"),
    ):
        with pytest.raises(InvalidInput) as caught:
            render_prompt(tokenizer, PromptFormat(**keys), record)
        assert str(caught.value).startswith(
            f"{field}: the chat template cannot be used on row 1: roles must alternate; correct the"
            " data, or the template: the file of student.chat_template or, without the key,"
        )
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("keys", "template", "field", "problem"),
    [
        ({"system": "9"}, None, "data.system", "no chat template"),
        ({"messages_column": "m"}, None, "data.messages_column", "no chat template"),
        ({"template_arguments": {"thinking": False}}, None, "data.template_arguments", "no chat"),
        (
            {"template_arguments": {"thinkng": False}},
            PLAIN,
            "data.template_arguments",
            "has no argument 'thinkng'",
        ),
    ],
)
def test_templates_that_do_not_fit(keys: Any, template: Any, field: str, problem: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_chat_template(PromptFormat(**keys), template)
    assert problem in caught.value.message
    assert caught.value.field == field
    if "thinkng" in problem:
        assert caught.value.hint == "did you mean 'thinking'?"


def test_templates_that_fit() -> None:
    check_chat_template(PromptFormat(), None)
    check_chat_template(PromptFormat(template_arguments={"thinking": False}, system="9"), PLAIN)
    check_generation(MARKED)
    for template in (None, PLAIN):
        with pytest.raises(InvalidInput, match=r"has no {% generation %}") as caught:
            check_generation(template)
        assert caught.value.field == "method.train_on"


def test_the_template_of_a_directory(chat_tokenizer: Any, tmp_path: Path) -> None:
    """The template that transformers finds, in each file in which a tokenizer may store it."""
    from transformers import AutoTokenizer

    assert chat_templates_in(tmp_path) == {}
    chat_tokenizer.save_pretrained(tmp_path)
    loaded_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert chat_templates_in(tmp_path) == {"default": PLAIN}
    assert template_text(loaded_tokenizer.chat_template) == PLAIN
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for stored_template in (PLAIN, [{"name": "default", "template": PLAIN}]):
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps(config | {"chat_template": stored_template})
        )
        assert chat_templates_in(tmp_path) == {"default": PLAIN}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": PLAIN}))
    assert chat_templates_in(tmp_path) == {"default": PLAIN}
    assert load_tokenizer(StudentConfig(model=str(tmp_path))).chat_template == PLAIN


def test_the_template_that_is_used_is_the_one_checked(tmp_path: Path) -> None:
    """{% generation %} in the template for tools does not mark answers without tools."""
    tokenizer = tiny.tokenizer(CHARACTERS)
    tokenizer.chat_template = {"default": PLAIN, "tool_use": MARKED}
    tokenizer.save_pretrained(tmp_path)
    templates = chat_templates_in(tmp_path)
    assert templates == {"default": PLAIN, "tool_use": MARKED}
    with pytest.raises(InvalidInput, match=r"has no {% generation %}"):
        check_generation(default_template(templates))
    tokenizer.chat_template = {"default": MARKED, "tool_use": PLAIN}
    form = PromptFormat(messages_column="m")
    talk = form.conversation({"m": TALK}, "row 1")
    assert assistant_ids(form, tokenizer, talk, "row 1")[1].any()
    talk = form.conversation({"m": TALK, "tools": [{}]}, "row 1")
    with pytest.raises(InvalidInput, match=r"has no {% generation %}"):
        assistant_ids(form, tokenizer, talk, "row 1")


def test_the_last_answer_and_its_end(chat_tokenizer: Any) -> None:
    form = PromptFormat(messages_column="m")
    for messages in (TALK, [*TALK, {"role": "user", "content": "5"}]):
        conversation = form.conversation({"m": messages}, "row 1")
        prompt_ids, answer_ids = answered_ids(form, chat_tokenizer, conversation, "row 1")
        assert chat_tokenizer.decode(prompt_ids) == "U1+1=A2<|end|>U2+2=A"
        assert chat_tokenizer.decode(answer_ids) == "4<|end|>"
    unanswered = form.conversation({"m": TALK[:1]}, "row 1")
    assert answered_ids(form, chat_tokenizer, unanswered, "row 1") == ([], [])
    assert completion_ids(PromptFormat(), chat_tokenizer, "4") == answer_ids
    assert completion_ids(PromptFormat(), chat_tokenizer, "") == []


def test_all_answers_and_their_ends(marked_tokenizer: Any) -> None:
    form = PromptFormat(messages_column="m")
    conversation = form.conversation({"m": [*TALK, {"role": "user", "content": "5"}]}, "row 1")
    ids, is_learned = assistant_ids(form, marked_tokenizer, conversation, "row 1")
    text = [marked_tokenizer.decode([token]) for token in ids]
    assert "".join(text) == "U1+1=A2<|end|>U2+2=A4<|end|>"
    assert [token for token, is_answer in zip(text, is_learned, strict=True) if is_answer] == [
        "2", "<|end|>", "4", "<|end|>",
    ]  # fmt: skip
    # If the template writes no end token, only the last answer gets one.
    marked_tokenizer = tiny.tokenizer(CHARACTERS)
    marked_tokenizer.chat_template = MARKED.replace("<|end|>", "")
    ids, is_learned = assistant_ids(form, marked_tokenizer, conversation, "row 1")
    assert marked_tokenizer.decode(ids) == "U1+1=A2U2+2=A4<|end|>"
    assert is_learned.sum() == 3


BASE_ENDS = "|"  # the end of a turn; the tokenizer's own end is <|end|>
BASE = PLAIN.replace("<|end|>", BASE_ENDS)


def base_with_template(template: str = BASE) -> Any:
    """As a base model that gets a chat template: its end of a turn is not its end token."""
    words = tiny.tokenizer(CHARACTERS + BASE_ENDS)
    words.add_special_tokens({"additional_special_tokens": [BASE_ENDS]})
    words.chat_template = template
    return words


def test_answers_end_where_the_template_ends_them() -> None:
    """With the end of a turn alone, and not with the tokenizer's end behind it."""
    words = base_with_template()
    form = PromptFormat(messages_column="m")
    talk = form.conversation({"m": TALK}, "row 1")
    before, answer = answered_ids(form, words, talk, "row 1")
    assert words.decode(before) == "U1+1=A2|U2+2=A"
    assert words.decode(answer) == "4|"
    assert completion_ids(PromptFormat(), words, "4") == answer
    assert words.decode(completion_ids(PromptFormat(chat_template=False), words, "4")) == "4<|end|>"


def test_earlier_answers_learn_their_end_too() -> None:
    words = base_with_template(MARKED.replace("<|end|>", BASE_ENDS))
    form = PromptFormat(messages_column="m")
    ids, learned = assistant_ids(form, words, form.conversation({"m": TALK}, "row 1"), "row 1")
    assert words.decode(ids) == "U1+1=A2|U2+2=A4|"
    assert words.decode([one for one, mark in zip(ids, learned, strict=True) if mark]) == "2|4|"


def test_an_end_token_with_the_id_0_ends_answers_too() -> None:
    """Of a template that writes the tokenizer's own end after some answers."""
    words = base_with_template(
        MARKED.replace("<|end|>", "{% if loop.first or loop.last %}|{% else %}<|end|>{% endif %}")
    )
    assert words.eos_token_id == 0
    form = PromptFormat(messages_column="m")
    talk = form.conversation({"m": [*TALK, *TALK]}, "row 1")
    ids, is_learned = assistant_ids(form, words, talk, "row 1")
    learned = [token for token, mark in zip(ids, is_learned, strict=True) if mark]
    assert words.decode(learned) == "2<|end|>4<|end|>2<|end|>4|"

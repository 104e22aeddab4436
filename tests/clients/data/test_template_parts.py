"""What a chat template leaves out is refused by name; what it only trims is not."""

from __future__ import annotations

from typing import Any

import pytest

from clients.data.conversation import Conversation
from clients.data.prompt_format import PromptFormat
from clients.data.template_parts import TemplateParts
from clients.data.tokens.answers import answered_ids
from protos.errors import InvalidInput
from tests.student_trainer import tiny

FORM = PromptFormat(messages_column="messages")
USER = {"role": "user", "content": "1+1="}
ANSWER = {"role": "assistant", "content": "2"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
# A template that writes all parts; each case below leaves one out.
FULL = (
    "{% for t in tools or [] %}T{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}{{ m.role[0] }}"
    "{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}"
    "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}"
    "\n{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
WITHOUT_SYSTEM = FULL.replace(
    "{{ m.content or '' }}", "{% if m.role != 'system' %}{{ m.content or '' }}{% endif %}"
)
WITHOUT_TOOL_MESSAGES = FULL.replace(
    "{{ m.content or '' }}", "{% if m.role != 'tool' %}{{ m.content or '' }}{% endif %}"
)
WITHOUT_DEVELOPER = FULL.replace(
    "{% for m in messages %}", "{% for m in messages if m.role != 'developer' %}"
)
WITHOUT_TOOLS = FULL.replace("{% for t in tools or [] %}T{{ t.function.name }}{% endfor %}", "")
WITHOUT_CALLS = FULL.replace(
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}", ""
)
WITHOUT_REASONING = FULL.replace(
    "{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}", ""
)
# As Qwen3's: of earlier messages the reasoning is left out, and spaces are trimmed.
TRIMMING = FULL.replace("m.reasoning_content %}", "m.reasoning_content and loop.last %}").replace(
    "{{ m.content or '' }}", "{{ (m.content or '') | trim }}"
)


def words_with(template: str) -> Any:
    words = tiny.tokenizer()
    words.chat_template = template
    return words


def talk(*messages: dict[str, Any], tools: Any = None) -> Conversation:
    return Conversation(messages, tools)


SYSTEM = talk({"role": "system", "content": "be brief"}, USER, ANSWER)
DEVELOPER = talk({"role": "developer", "content": "be brief"}, USER, ANSWER)
TOOLS = talk(USER, ANSWER, tools=(TOOL,))
CALLS = talk(USER, {"role": "assistant", "content": None, "tool_calls": [CALL]})
TOOL_MESSAGE = talk(
    USER, {**ANSWER, "tool_calls": [CALL]}, {"role": "tool", "content": "2"}, ANSWER
)
REASONING = talk(USER, {**ANSWER, "reasoning_content": "one and one"})


@pytest.mark.parametrize(
    ("template", "conversation", "part"),
    [
        (WITHOUT_SYSTEM, SYSTEM, "the system message"),
        (WITHOUT_DEVELOPER, DEVELOPER, "the developer message"),
        (WITHOUT_TOOLS, TOOLS, "the column 'tools'"),
        (WITHOUT_CALLS, CALLS, "the tool calls"),
        (WITHOUT_TOOL_MESSAGES, TOOL_MESSAGE, "the tool message"),
        (WITHOUT_REASONING, REASONING, "the key 'reasoning_content'"),
    ],
)
def test_a_part_that_is_left_out_is_refused_by_name(
    template: str, conversation: Conversation, part: str
) -> None:
    parts = TemplateParts(FORM, words_with(template))
    assert parts.has_new(conversation)
    for _ in range(2):  # also when it is asked again
        with pytest.raises(InvalidInput, match=f"drops {part} of row 7"):
            parts.check(conversation, "row 7")
    whole = TemplateParts(FORM, words_with(FULL))
    whole.check(conversation, "row 7")
    assert not whole.has_new(conversation), "looked at once"


@pytest.mark.parametrize("conversation", [SYSTEM, DEVELOPER, TOOLS, CALLS, TOOL_MESSAGE, REASONING])
@pytest.mark.parametrize("template", [FULL, TRIMMING])
def test_what_is_only_trimmed_is_accepted(template: str, conversation: Conversation) -> None:
    TemplateParts(FORM, words_with(template)).check(conversation, "row 7")


def test_reasoning_of_earlier_messages_may_be_left_out() -> None:
    earlier = talk(USER, {**ANSWER, "reasoning_content": "one"}, USER, ANSWER)
    TemplateParts(FORM, words_with(TRIMMING)).check(earlier, "row 7")


def test_an_answer_that_is_stripped_is_refused() -> None:
    """As templates do that remove <think> from every message."""
    thinking = talk(USER, {"role": "assistant", "content": "<think>1</think>\n2 "})
    stripping = FULL.replace("{{ m.content or '' }}", "{{ m.content.split('</think>')[-1] }}")
    with pytest.raises(InvalidInput, match="drops a part of the answer of row 7"):
        answered_ids(FORM, words_with(stripping), thinking, "row 7")
    answered_ids(FORM, words_with(TRIMMING), thinking, "row 7")


def test_an_answer_is_not_looked_for_in_earlier_messages() -> None:
    """A template that writes the newest question only, and removes <think> from answers."""
    stripping = FULL.replace("{{ m.content or '' }}", "{{ m.content.split('</think>')[-1] }}")
    newest = stripping.replace(
        "{% for m in messages %}", "{{ messages | length }}{% for m in messages %}"
    )
    thinking = talk({**USER, "content": "<think>1"}, {**ANSWER, "content": "<think>1</think>"})
    with pytest.raises(InvalidInput, match="row 7"):
        answered_ids(FORM, words_with(newest), thinking, "row 7")


def test_without_a_template_nothing_is_left_out() -> None:
    plain = PromptFormat(chat_template=False)
    assert not TemplateParts(plain, words_with(WITHOUT_SYSTEM)).has_new(SYSTEM)


@pytest.mark.parametrize("content", ["<think>1</think>2", "<think></think>2"])
def test_a_prompt_that_holds_the_start_of_the_answer(content: str) -> None:
    """As Qwen3-Thinking's template, whose generation prompt ends with <think>."""
    template = FULL.replace(
        "{% if add_generation_prompt %}a{% endif %}",
        "{% if add_generation_prompt %}a<think>{% endif %}",
    )
    thinking = talk(USER, {"role": "assistant", "content": content})
    answered_ids(FORM, words_with(template), thinking, "row 7")

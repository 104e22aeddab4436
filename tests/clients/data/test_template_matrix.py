"""Thirty-two chat templates that drop a part are refused by its name; ten that trim are accepted.

Four formats of real models, as templates with every part; each case leaves one part out.
"""

from __future__ import annotations

import json
import re
from itertools import product
from typing import Any

import pytest

from clients.data.prompt_format import PromptFormat
from clients.data.template_parts import TemplateParts
from clients.data.tokens.answers import answered_ids
from protos.errors import InvalidInput
from tests.student_trainer import tiny

# (before a message of ROLE, after it, end of the conversation's prompt)
FORMATS = {
    "chatml": ("<|im_start|>ROLE\n", "<|im_end|>\n", "<|im_start|>assistant\n"),
    "llama3": (
        "<|start_header_id|>ROLE<|end_header_id|>\n\n",
        "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gemma": ("<start_of_turn>ROLE\n", "<end_of_turn>\n", "<start_of_turn>assistant\n"),
    "mistral": ("[ROLE]", "</s>", "[assistant]"),
}
PARTS = {
    "system": "{% if m.role == 'system' %}{{ m.content }}{% endif %}",
    "developer": "{% if m.role == 'developer' %}{{ m.content }}{% endif %}",
    "tool": "{% if m.role == 'tool' %}{{ m.content }}{% endif %}",
    "reasoning": "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}",
    "thinking": "{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}",
    "content": "{% if m.role in ('user', 'assistant') %}{{ m.content or '' }}{% endif %}",
    "calls": "{% for c in m.tool_calls or [] %}({{ c.function.name }}"
    " {{ c.function.arguments | tojson }}){% endfor %}",
}
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
SPLIT = PARTS["content"].replace("m.content or ''", "(m.content or '').split('</think>')[-1]")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
QUESTION = {"role": "user", "content": "1+1="}
ANSWER = {"role": "assistant", "content": "<think>one</think>2"}
# By part: how a template leaves it out, a conversation with it, and its name in the error.
DROPPED: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "system": (
        "",
        [{"role": "system", "content": "brief"}, QUESTION, ANSWER],
        "the system message",
    ),
    "developer": (
        "",
        [{"role": "developer", "content": "brief"}, QUESTION, ANSWER],
        "the developer message",
    ),
    "tool": (
        "",
        [QUESTION, {**ANSWER, "tool_calls": [CALL]}, {"role": "tool", "content": "2"}, ANSWER],
        "the tool message",
    ),
    "reasoning": (
        "",
        [QUESTION, {"role": "assistant", "content": "2", "reasoning_content": "one"}],
        "the key 'reasoning_content'",
    ),
    "thinking": (
        "",
        [QUESTION, {"role": "assistant", "content": "2", "thinking": "one"}],
        "the key 'thinking'",
    ),
    "content": (SPLIT, [QUESTION, ANSWER], "a part of the answer"),
    "calls": (
        "",
        [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
        "the tool calls",
    ),
    "tools": ("", [QUESTION, ANSWER], "the column 'tools'"),
}
TRIMMED = {
    "both ends": ("content", "m.content or ''", "(m.content or '') | trim"),
    "the start": ("content", "m.content or ''", "(m.content or '').lstrip()"),
    "the end": ("content", "m.content or ''", "(m.content or '').rstrip('\\n')"),
    "the system message": ("system", "m.content", "m.content | trim"),
    "the developer message": ("developer", "m.content", "m.content.strip()"),
    "tool messages": ("tool", "m.content", "m.content | trim"),
    "the reasoning": ("reasoning", "m.reasoning_content }}", "m.reasoning_content.strip() }}"),
    "spaces around reasoning": ("reasoning", "<think>", "<think>\n"),
    "earlier reasoning": (
        "reasoning",
        "m.reasoning_content %}",
        "m.reasoning_content and loop.last %}",
    ),
    "lines in the answer": (
        "content",
        "m.content or ''",
        "(m.content or '').replace('\\n\\n', '\\n')",
    ),
}
FORM = PromptFormat(messages_column="messages")


def template_of(name: str, parts: dict[str, str], tools: str = TOOLS) -> str:
    before, after, end = FORMATS[name]
    before = before.replace("ROLE", "{{ m.role }}")
    return (
        f"{tools}{{% for m in messages %}}{before}{''.join(parts.values())}{after}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{end}{{% endif %}}"
    )


def use(template: str, messages: list[dict[str, Any]], *, tools: bool) -> None:
    """Do with a record what training does; raise its error."""
    words = tiny.tokenizer()
    words.chat_template = template
    record: dict[str, Any] = {"messages": messages}
    if tools:
        record["tools"] = json.dumps([CALL])
    conversation = FORM.conversation(record, "row 7")
    TemplateParts(FORM, words).check(conversation, "row 7")
    answered_ids(FORM, words, conversation, "row 7")


@pytest.mark.parametrize(("name", "part"), list(product(FORMATS, DROPPED)))
def test_a_dropped_part_is_refused_by_name(name: str, part: str) -> None:
    """The same template with the part is accepted."""
    rest, messages, error_name = DROPPED[part]
    use(template_of(name, PARTS), messages, tools=part == "tools")
    if part == "tools":
        dropping = template_of(name, PARTS, tools="")
    else:
        # transformers passes the reasoning under both of its names.
        keys = {"reasoning", "thinking"} if part in ("reasoning", "thinking") else {part}
        dropping = template_of(name, {**PARTS, **dict.fromkeys(keys, rest)})
    with pytest.raises(InvalidInput, match=f"drops {re.escape(error_name)} of row 7"):
        use(dropping, messages, tools=part == "tools")


@pytest.mark.parametrize("change", TRIMMED)
def test_a_template_that_only_trims_is_accepted(change: str) -> None:
    part, text, trimmed = TRIMMED[change]
    assert text in PARTS[part]
    parts = {**PARTS, part: PARTS[part].replace(text, trimmed)}
    talks = [messages for _, messages, _ in DROPPED.values()]
    talks.append(
        [
            {"role": "system", "content": " brief\n"},
            {**QUESTION, "content": "1+1= "},
            {"role": "assistant", "content": " 1\n\n2 \n", "reasoning_content": "\none "},
        ]
    )
    for messages in talks:
        use(template_of("chatml", parts), messages, tools=True)

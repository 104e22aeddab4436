"""Checks that a chat template writes every part of a conversation.

A template silently drops parts that it does not support. Without this check, a tool call would be
trained as an empty answer, and a system message would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from clients.data.conversation import REASONING, TOOLS, Conversation
from clients.data.prompt_format import PromptFormat
from protos.errors import InvalidInput

_MARK = "zqmarkzq"
_ROLES = ("system", "developer", "tool")


class TemplateParts:
    """Checks that a chat template writes each kind of part that occurs in conversations.

    The kinds are: messages of the roles system, developer and tool; tools; tool calls; the
    reasoning of the last message. The check uses the first conversation with a part of the kind. It
    puts a mark into the part, renders the conversation, and searches the text for the mark.
    """

    def __init__(self, prompt_format: PromptFormat, tokenizer: Any) -> None:
        self._prompt_format = prompt_format
        self._tokenizer = tokenizer
        self._is_rendered = prompt_format.renders(tokenizer)
        self._checked: set[str] = set()

    def has_new(self, conversation: Conversation) -> bool:
        """Return whether the conversation has a kind of part that no earlier conversation had."""
        return self._is_rendered and any(
            name not in self._checked for name, _ in _marked_parts(conversation)
        )

    def check(self, conversation: Conversation, location: str) -> None:
        """Raise InvalidInput if the template drops a part of the conversation.

        The conversation ends with an answer, or is a prompt. Only kinds of parts that no earlier
        conversation had are checked.
        """
        if not self._is_rendered:
            return
        for name, marked in _marked_parts(conversation):
            if name in self._checked:
                continue
            text = self._prompt_format.rendered(
                self._tokenizer, marked, location, add_answer_start=not marked.is_answered
            )
            if _MARK not in text:
                raise InvalidInput(
                    f"the chat template drops {name} of {location}",
                    field="data.system" if name == "the system message" else "data.messages_column",
                    hint="use a tokenizer whose template keeps this part, or remove the part"
                    " from the data",
                )
            self._checked.add(name)


def has_text(rendered: str, answer: str) -> bool:
    """Return whether a rendered text contains the text of an answer, ignoring white space."""
    return "".join(answer.split()) in "".join(rendered.split())


def require_answer_text(answer: str, rendered: str, location: str) -> None:
    """Raise InvalidInput if the rendered text does not contain the text of the answer.

    White space may differ, because templates trim texts.
    """
    if not has_text(rendered, answer):
        raise InvalidInput(
            f"the chat template drops a part of the answer of {location}",
            field="data.messages_column",
            hint="if the template removes <think>...</think>, move the reasoning to the key"
            " reasoning_content, or use another template",
        )


def _marked_parts(conversation: Conversation) -> Iterator[tuple[str, Conversation]]:
    """Yield the name of each part, and the conversation with a mark in that part."""
    messages = conversation.messages
    if conversation.tools:
        tools = [_with_marked_name(tool) for tool in conversation.tools]
        yield f"the column {TOOLS!r}", replace(conversation, tools=tuple(tools))

    def with_message(number: int, **changes: Any) -> Conversation:
        changed = (*messages[:number], {**messages[number], **changes}, *messages[number + 1 :])
        return replace(conversation, messages=changed)

    for number, message in enumerate(messages):
        role = message["role"]
        if role in _ROLES and isinstance(message.get("content"), str) and message["content"]:
            yield f"the {role} message", with_message(number, content=_MARK)
        if calls := message.get("tool_calls"):
            marked = [_with_marked_name(call) for call in calls]
            yield "the tool calls", with_message(number, tool_calls=marked)
    # A template may leave out the reasoning of earlier messages, so only check the last message.
    for key in REASONING:
        if messages and messages[-1]["role"] == "assistant" and messages[-1].get(key):
            yield f"the key {key!r}", with_message(len(messages) - 1, **{key: _MARK})


def _with_marked_name(entry: Any) -> Any:
    """Return a tool, or a tool call, with the mark as the name of its function."""
    if not isinstance(entry, Mapping):
        return entry
    if isinstance(entry.get("function"), Mapping):
        return {**entry, "function": {**entry["function"], "name": _MARK}}
    return {**entry, "name": _MARK}

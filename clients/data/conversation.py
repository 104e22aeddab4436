"""Reads a conversation from a record of a data set, with the tools that the assistant may call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from clients.data.outside import parse_json
from protos.errors import InvalidInput

Message: TypeAlias = Mapping[str, Any]

# The column of the tools, beside the column of the messages.
TOOLS = "tools"
# Chat templates silently drop messages with an unknown role.
_ROLES = ("system", "developer", "user", "assistant", "tool")
# Roles by the names of ShareGPT.
_SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
_FIELD = "data.messages_column"
_COMPLETION_FIELD = "data.completion_column"
# The keys of an answer's reasoning, as chat templates name it.
REASONING = ("reasoning_content", "thinking", "reasoning")
_COLUMN = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Conversation:
    """A conversation for a chat template.

    - messages: the messages, each with a role and a content.
    - tools: JSON schemas of functions that the assistant may call; None if there are none.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] | None = None

    @property
    def characters(self) -> int:
        """The number of characters of all texts that a chat template may render."""
        parts = [
            message.get(key) for message in self.messages for key in ("tool_calls", *REASONING)
        ]
        contents = [text_of_content(message.get("content")) for message in self.messages]
        return sum(map(_count_characters, [*contents, *parts, self.tools]))

    @property
    def is_answered(self) -> bool:
        """Whether the last message is an assistant message."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    @property
    def question(self) -> str:
        """The text of the last user message; "" if there is none."""
        user_messages = (m for m in reversed(self.messages) if m["role"] == "user")
        return text_of_content(next(user_messages, {}).get("content"))

    @property
    def answer(self) -> str:
        """The text of the last message if it is an assistant message, otherwise ""."""
        return text_of_content(self.messages[-1].get("content")) if self.is_answered else ""

    def unanswered(self) -> Conversation:
        """Return the conversation without its last message if that is an assistant message."""
        return replace(self, messages=self.messages[:-1]) if self.is_answered else self

    def up_to_answer(self) -> Conversation:
        """Return the conversation up to its last trained assistant message; see `is_learned`.

        Without such a message, the result has no messages.
        """
        end = len(self.messages)
        while end and not is_learned(self.messages[end - 1]):
            end -= 1
        return replace(self, messages=self.messages[:end])

    def prefixed(self, text: str) -> Conversation:
        """Return the conversation with `text` at the beginning of the last user message.

        If there is no user message, `text` becomes a user message at the end.
        """
        messages = list(self.messages)
        for number in reversed(range(len(messages))):
            if messages[number]["role"] == "user":
                content = text + str(messages[number]["content"])
                messages[number] = {**messages[number], "content": content}
                return replace(self, messages=tuple(messages))
        return replace(self, messages=(*messages, {"role": "user", "content": text}))


def is_learned(message: Message) -> bool:
    """Return whether a message is trained.

    Trained messages are the assistant messages that have neither `weight = 0` nor `train = false`.
    """
    is_off = message.get("weight") == 0 or message.get("train") is False
    return bool(message["role"] == "assistant" and not is_off)


def has_content(message: Message) -> bool:
    """Return whether an assistant message has a text, reasoning or a tool call."""
    parts = (message.get(key) for key in ("tool_calls", *REASONING))
    return any(parts) or bool(text_of_content(message.get("content")).strip())


def columns_named(context: str) -> Sequence[str]:
    """Return the column names in braces in a context text. {prompt} and {answer} are left out."""
    return [name for name in _COLUMN.findall(context) if name not in ("prompt", "answer")]


def with_context(
    conversation: Conversation, context: str, columns: Mapping[str, Any], field: str
) -> Conversation:
    """Return the conversation with `context` at the beginning of its last user message.

    Each {column} in `context` is replaced by the value in `columns`. Raises InvalidInput if a
    column does not exist. The error names `field`, the key of the context.
    """

    def value(match: re.Match[str]) -> str:
        if match[1] not in columns:
            raise InvalidInput(
                f"the data has no column {match[1]!r}",
                field=field,
                hint=f"use one of these columns: {', '.join(sorted(columns))}",
            )
        return str(columns[match[1]])

    return conversation.prefixed(_COLUMN.sub(value, context))


def text_of_content(content: Any) -> str:
    """Return the text of a message's content: the content, or the text parts in a list of parts."""
    if isinstance(content, list):
        parts = (part for part in content if isinstance(part, Mapping))
        return "\n".join(str(part.get("text")) for part in parts if part.get("type") == "text")
    return str(content or "")


def _count_characters(value: Any) -> int:
    """Return the number of characters of all texts in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    return sum(map(_count_characters, value)) if isinstance(value, list | tuple) else 0


def conversation_in(
    record: Mapping[str, Any],
    column: str,
    location: str,
    images: int | None = None,
    completion_column: str | None = None,
) -> Conversation:
    """Return the conversation in a column of a record, with the tools in its column `tools`.

    - location: the record for messages, such as `row 3 of data.jsonl`.
    - images: number of images of the record; None if the job has no images. With images, a content
      may be a list of parts such as {"type": "image"} and {"type": "text", "text": "..."}. The
      messages must have one image part for each image.
    - completion_column: a column with messages that follow the messages of `column`.

    Keys with the value null, which Parquet adds to every message, are removed.

    Raises InvalidInput if a column is missing or has another type, or if a message has no text.
    Assistant messages with tool calls need no text.
    """
    messages = list[Message]()
    for field, name in ((_FIELD, column), (_COMPLETION_FIELD, completion_column)):
        if name is None:
            continue
        column_messages = messages_in(record.get(name))
        if column_messages is None:
            raise InvalidInput(
                f"{location} has no list of messages in column {name!r}; its columns are"
                f" {', '.join(record)}",
                field=field,
                hint='each message must be like {"role": "user", "content": "..."}',
            )
        messages += column_messages
    for number, message in enumerate(messages, 1):
        _check_message(message, f"message {number} of {location}", parts=images is not None)
    if images is not None:
        _check_images(messages, images, location)
    return Conversation(tuple(messages), _parse_tools(record.get(TOOLS), location))


def require_question(conversation: Conversation, location: str) -> None:
    """Raise InvalidInput if the conversation has no message before its final assistant message."""
    if not conversation.unanswered().messages:
        raise InvalidInput(
            f"the conversation of {location} has no message before the assistant's answer",
            field=_FIELD,
            hint="remove the row, or add a user message",
        )


def messages_in(value: Any) -> list[Message] | None:
    """Return the messages in the value of a column; None if the value is not a list of messages.

    A message of ShareGPT, such as {"from": "human", "value": "..."}, gets the keys role and
    content. Keys with the value null are removed.
    """
    if not isinstance(value, list):
        return None
    messages = [_from_share_gpt(entry) if isinstance(entry, dict) else entry for entry in value]
    if not all(map(_is_message, messages)):
        return None
    return [_without_nulls(message) for message in messages]


def _from_share_gpt(message: Message) -> Message:
    speaker = message.get("from")
    if message.get("role") is not None or not isinstance(speaker, str) or "value" not in message:
        return message
    content = {"role": _SPEAKERS.get(speaker, speaker), "content": message["value"]}
    extra_keys = message.keys() - {"from", "value", "role", "content"}
    return {**content, **{key: message[key] for key in message if key in extra_keys}}


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    return "content" in value or bool(value.get("tool_calls"))


def _check_message(message: Message, location: str, *, parts: bool) -> None:
    if message["role"] not in _ROLES:
        raise InvalidInput(
            f"{location} has the role {message['role'][:40]!r}",
            field=_FIELD,
            hint=f"use one of {', '.join(_ROLES)}",
        )
    listed_calls = message.get("tool_calls", [])
    if not isinstance(listed_calls, list) or not all(isinstance(c, dict) for c in listed_calls):
        raise InvalidInput(
            f"{location} has tool_calls that are not a list of objects",
            field=_FIELD,
            hint='write a list like [{"type": "function", "function": {...}}], or remove the key',
        )
    if message.get("weight", 1) not in (0, 1) or message.get("train", True) not in (True, False):
        raise InvalidInput(
            f"{location} has a weight other than 0 and 1, or a `train` that is not a boolean",
            field=_FIELD,
            hint="weight = 0 or train = false excludes a message from training; use"
            " data.weight_column for weights of records",
        )
    content = message.get("content")
    if parts and isinstance(content, list) and all(map(_is_part, content)):
        return
    calls = message["role"] == "assistant" and message.get("tool_calls")
    if not isinstance(content, str) and not (content is None and calls):
        kind = "null" if content is None else f"a {type(content).__name__}"
        raise InvalidInput(
            f"{location} has no text: its content is {kind}",
            field=_FIELD,
            hint="remove such messages, or write their content as one string",
        )


def _without_nulls(message: Message) -> Message:
    """Return a message without the keys whose value is null, also in the parts of its content."""
    fields = {key: value for key, value in message.items() if value is not None}
    if isinstance(content := fields.get("content"), list):
        fields["content"] = [
            {key: value for key, value in part.items() if value is not None}
            if isinstance(part, dict)
            else part
            for part in content
        ]
    return fields


def _is_part(part: Any) -> bool:
    """Return whether the value is a content part: an image or a text."""
    match part:
        case {"type": "image", **extra_keys}:
            return not extra_keys
        case {"type": "text", "text": str()}:
            return True
    return False


def _check_images(messages: Sequence[Message], images: int, location: str) -> None:
    """Raise InvalidInput if the number of image parts in the messages differs from `images`."""
    contents = [
        message["content"] for message in messages if isinstance(message.get("content"), list)
    ]
    places = sum(part["type"] == "image" for content in contents for part in content)
    if places != images:
        raise InvalidInput(
            f"{location} has {images} images, but its messages have {places} parts"
            ' {"type": "image"}',
            field="data.image_column",
            hint="write one such part for each image, at the place of the image",
        )


def _parse_tools(value: Any, location: str) -> tuple[Mapping[str, Any], ...] | None:
    """Return the tools in the value of a column; None if there are none.

    The value is a list of objects, or JSON text of such a list, as in Parquet files. Raises
    InvalidInput for another value.
    """
    if value is None:
        return None
    tools: list[Any] = [None]
    try:
        listed = parse_json(value) if isinstance(value, str) else value
        if isinstance(listed, list):
            tools = [parse_json(entry) if isinstance(entry, str) else entry for entry in listed]
    except ValueError:
        pass
    if not all(isinstance(tool, dict) for tool in tools):
        raise InvalidInput(
            f"the column {TOOLS!r} of {location} is not a list of tools",
            field=_FIELD,
            hint='write tools like {"type": "function", "function": {...}}, or rename the column',
        )
    return tuple(tools) or None

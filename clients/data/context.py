"""Context that one reader of a prompt has and the student has not: an anchor or a teacher."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from clients.data.conversation import Conversation
from protos.errors import InvalidInput

_COLUMN = re.compile(r"\{(\w+)\}")


def with_context(
    asked: Conversation, context: str, columns: Mapping[str, Any], field: str
) -> Conversation:
    """Return a conversation with `context` before its last user message.

    `context` may contain {column} for each of `columns`. Raises InvalidInput, naming `field`, the
    key of the context, if a column does not exist.
    """

    def value(match: re.Match[str]) -> str:
        if match[1] not in columns:
            raise InvalidInput(
                f"the data has no column {match[1]!r}",
                field=field,
                hint=f"use one of these columns: {', '.join(sorted(columns))}",
            )
        return str(columns[match[1]])

    return asked.prefixed(_COLUMN.sub(value, context))

"""The key `labels` of every job: names and values for finding and grouping jobs."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

_NAME = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}"
_MAX_LABELS, _MAX_CHARS = 32, 200


def _parse_labels(value: Any) -> dict[str, str]:
    """Return the labels as texts. As a number, 1.10 would become 1.1."""
    if not isinstance(value, dict):
        raise ValueError("must be a table of names and texts")
    if len(value) > _MAX_LABELS:
        raise ValueError(f"must have at most {_MAX_LABELS} labels")
    for name, text in value.items():
        if not re.fullmatch(_NAME, name):
            raise ValueError(f"{name!r} is no name of a label: up to 63 of A-Z a-z 0-9 . _ / -")
        if not isinstance(text, str) or not 0 < len(text) <= _MAX_CHARS:
            raise ValueError(
                f"label {name!r} must be a text of 1 to {_MAX_CHARS} characters, in quotes"
            )
    return dict(value)


Labels = Annotated[
    dict[str, str],
    PlainValidator(_parse_labels),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}}),
]

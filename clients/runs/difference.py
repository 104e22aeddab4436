"""The first key by which two jobs differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def first_difference(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[str, Any, Any] | None:
    """Return a key such as `train.learning_rate`, and its value in both; None if all are equal.

    `one`, `other`: dumps of jobs. A key that only one of them has is None in the other.
    """
    first, second = _values(one), _values(other)
    for key in sorted(first | second):
        if first.get(key) != second.get(key):
            return key, first.get(key), second.get(key)
    return None


def _values(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{above}{name}"
        found |= _values(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return found

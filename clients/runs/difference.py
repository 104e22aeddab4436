"""The first key by which two jobs differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def first_difference(
    left: Mapping[str, Any], right: Mapping[str, Any]
) -> tuple[str, Any, Any] | None:
    """Return a key such as `train.learning_rate`, and its value in both; None if all are equal.

    `left`, `right`: dumps of jobs. A key that only one of them has is None in the other.
    """
    left_values, right_values = _flatten(left), _flatten(right)
    for key in sorted(left_values | right_values):
        if left_values.get(key) != right_values.get(key):
            return key, left_values.get(key), right_values.get(key)
    return None


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{prefix}{name}"
        values |= _flatten(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return values

"""The table `sweep` of a job: lists of values for keys of the job. Each combination is one job.

If `sweep` is a list of tables, each table in the list gives one job.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from clients.config.lines import KeyPath
from protos.rpc.transport import MAX_SUBMITTED_JOBS

# The label with the name of the sweep, which all of its jobs have.
LABEL = "sweep"
# A longer value appears as its number in the list: names and labels of jobs have a limit.
_MAX_CHARS = 60


class SweepFault(ValueError):
    """The table `sweep` is invalid. `path`: the key inside the table; () means the whole table."""

    def __init__(self, path: KeyPath, message: str) -> None:
        super().__init__(message)
        self.path = path
        self.message = message


@dataclass(frozen=True)
class SweepPoint:
    """One combination of the values of a sweep, which gives one job.

    - values: the value of each key.
    - texts: the value of each key as text, by the dotted key.
    - suffix: text to append to the name of the job.
    """

    values: Mapping[KeyPath, Any]
    texts: Mapping[str, str]
    suffix: str


def points_of(table: Any) -> Sequence[SweepPoint]:
    """Return all combinations of the lists in a table `sweep`. The last key changes fastest.

    `table` may also be a list of tables with one value for each key. Then each table is one point.

    Raises SweepFault if a list is empty or has equal values, or if there are too many points.
    """
    combinations: Iterable[Mapping[KeyPath, Any]]
    if isinstance(table, list) and table:
        combinations = [_collect_change(change, number) for number, change in enumerate(table)]
        lists: dict[KeyPath, list[Any]] = {}
        for key, value in (entry for change in combinations for entry in change.items()):
            listed = lists.setdefault(key, [])
            listed += [] if _contains(listed, value) else [value]
        number = len(table)
    else:
        lists = _collect_lists(table)
        combinations = (
            dict(zip(lists, values, strict=True)) for values in product(*lists.values())
        )
        number = math.prod(map(len, lists.values()))
    if number > MAX_SUBMITTED_JOBS:
        raise SweepFault((), f"has {number} combinations; a sweep has at most {MAX_SUBMITTED_JOBS}")
    name_counts = Counter(key[-1] for key in lists)
    short_names = {key: key[-1] if name_counts[key[-1]] == 1 else ".".join(key) for key in lists}
    points = []
    for values in combinations:
        texts = {key: _value_text(value, lists[key]) for key, value in values.items()}
        suffix = "".join(f"-{short_names[key]}={text}" for key, text in texts.items())
        points.append(
            SweepPoint(values, {".".join(key): text for key, text in texts.items()}, suffix)
        )
    return points


def _collect_lists(table: Any) -> dict[KeyPath, list[Any]]:
    """Return the list of values of each key. The quoted key "a.b" is the key b in the table a."""
    list_by_key: dict[KeyPath, list[Any]] = {}
    for key, listed in _iterate_entries(table, ()) if isinstance(table, dict) else ():
        if not isinstance(listed, list) or not listed:
            raise SweepFault(key, f"must be a list of values (got {listed!r})")
        for number, value in enumerate(listed):
            if _contains(listed[:number], value):
                raise SweepFault(key, f"has the value {_format_json(value)} twice; remove one")
        _check_key(key, list_by_key)
        list_by_key[key] = listed
    if not list_by_key:
        example = '"train.learning_rate" = [1e-5, 3e-5]'
        raise SweepFault((), f"must be a table of keys with lists of values, such as {example}")
    return list_by_key


def _collect_change(change: Any, number: int) -> Mapping[KeyPath, Any]:
    """Return the value of each key of one table in a list. `number`: index of the table."""
    value_by_key: dict[KeyPath, Any] = {}
    for key, value in _iterate_entries(change, ()) if isinstance(change, dict) else ():
        _check_key(key, value_by_key)
        value_by_key[key] = value
    if not value_by_key:
        raise SweepFault((str(number),), "must be a table of keys and values, such as { seed = 2 }")
    return value_by_key


def _check_key(key: KeyPath, other_keys: Collection[KeyPath]) -> None:
    """Raise SweepFault if a sweep must not set `key`, or if `other_keys` conflict with it."""
    if key in other_keys:
        raise SweepFault(key, "is given twice")
    for other_key in other_keys:
        if key[: len(other_key)] == other_key or other_key[: len(key)] == key:
            outer_key = ".".join(key if len(key) < len(other_key) else other_key)
            raise SweepFault(key, f"{outer_key} has a list too; remove one of the two lists")
    if key == ("name",) or key[0] == "labels":
        raise SweepFault(key, "the sweep sets the names and labels of its jobs; remove the key")


def _contains(listed: Iterable[Any], value: Any) -> bool:
    return any(_are_equal(value, other) for other in listed)


def _are_equal(first: Any, second: Any) -> bool:
    """Return whether two values give equal jobs: True for 1 and 1.0, False for 1 and true."""
    if isinstance(first, bool) is not isinstance(second, bool):
        return False
    return bool(first == second) or _format_json(first) == _format_json(second)  # nan


def _format_json(value: Any) -> str:
    return json.dumps(value, default=str)


def _iterate_entries(table: Mapping[str, Any], path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    for name, value in table.items():
        key = (*path, *(part.strip() for part in name.split(".")))
        if isinstance(value, dict) and value:
            yield from _iterate_entries(value, key)
        else:
            yield key, value


def _value_text(value: Any, listed: Sequence[Any]) -> str:
    """Return a value as text for the name and labels of a job.

    For a long value, return `#N`: the value is the N-th (from 1) in `listed`, the list of its key.
    """
    text = value if isinstance(value, str) and value else _format_json(value)
    if len(text) <= _MAX_CHARS:
        return text
    return f"#{next(n for n, other in enumerate(listed, start=1) if _are_equal(other, value))}"

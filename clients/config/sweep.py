"""The table `sweep` of a job: lists of values for its keys, and a job for each combination."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from clients.config.lines import KeyPath
from protos.rpc.transport import MAX_SUBMITTED_JOBS

# The label with the name of the sweep, which all of its jobs have.
LABEL = "sweep"
# A longer value is called by its place in the list: names and labels of jobs have a limit.
_MOST_CHARS = 60


class SweepFault(ValueError):
    """The table is invalid: `path` is the key inside it, () for all of it."""

    def __init__(self, path: KeyPath, message: str) -> None:
        super().__init__(message)
        self.path = path
        self.message = message


@dataclass(frozen=True)
class Point:
    """One combination of the values: `values` by key.

    `texts` has each value by its key in full, and `suffix` is what the name of the job gets.
    """

    values: Mapping[KeyPath, Any]
    texts: Mapping[str, str]
    suffix: str


def points_of(table: Any) -> Sequence[Point]:
    """Return the product of the lists, in their order; the last key changes fastest.

    Raises SweepFault if `table` has no lists of different values, or too many combinations.
    """
    lists = _lists(table)
    number = math.prod(map(len, lists.values()))
    if number > MAX_SUBMITTED_JOBS:
        raise SweepFault((), f"has {number} combinations; {MAX_SUBMITTED_JOBS} at most are a sweep")
    ends = Counter(key[-1] for key in lists)
    short = {key: key[-1] if ends[key[-1]] == 1 else ".".join(key) for key in lists}
    texts = {key: _texts(listed) for key, listed in lists.items()}
    points = []
    for places in product(*(range(len(listed)) for listed in lists.values())):
        at = dict(zip(lists, places, strict=True))
        points.append(
            Point(
                {key: lists[key][n] for key, n in at.items()},
                {".".join(key): texts[key][n] for key, n in at.items()},
                "".join(f"-{short[key]}={texts[key][n]}" for key, n in at.items()),
            )
        )
    return points


def _lists(table: Any) -> Mapping[KeyPath, Sequence[Any]]:
    """Return the list of each key; "a.b" in quotes is the same key as b in the table a."""
    found: dict[KeyPath, Sequence[Any]] = {}
    for key, listed in _entries(table, ()) if isinstance(table, dict) else ():
        if not isinstance(listed, list) or not listed:
            raise SweepFault(key, f"must be a list of values (got {listed!r})")
        if key in found:
            raise SweepFault(key, "is there twice")
        for number, value in enumerate(listed):
            if any(_same(value, other) for other in listed[:number]):
                raise SweepFault(key, f"has {_written(value)} twice; leave one out")
        for other in found:
            if key[: len(other)] == other or other[: len(key)] == key:
                both = ".".join(key if len(key) < len(other) else other)
                raise SweepFault(key, f"{both} has a list itself; give one of the two a list")
        if key == ("name",) or key[0] == "labels":
            raise SweepFault(key, "each job gets a name and labels by its values; leave it out")
        found[key] = listed
    if not found:
        example = '"train.learning_rate" = [1e-5, 3e-5]'
        raise SweepFault((), f"must be a table of keys with lists of values, such as {example}")
    return found


def _same(one: Any, other: Any) -> bool:
    """Return whether two values make equal jobs: 1 and 1.0 do, 1 and true do not."""
    if isinstance(one, bool) is not isinstance(other, bool):
        return False
    return bool(one == other) or _written(one) == _written(other)  # nan


def _written(value: Any) -> str:
    return json.dumps(value, default=str)


def _entries(table: Mapping[str, Any], path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    for name, value in table.items():
        key = (*path, *(part.strip() for part in name.split(".")))
        if isinstance(value, dict):
            yield from _entries(value, key)
        else:
            yield key, value


def _texts(listed: Sequence[Any]) -> Sequence[str]:
    found = []
    for number, value in enumerate(listed, start=1):
        text = value if isinstance(value, str) and value else _written(value)
        found.append(text if len(text) <= _MOST_CHARS else f"#{number}")
    return found

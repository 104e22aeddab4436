"""Ids and identities of runs, and the comparison of two jobs."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clients.data.outside import open_regular
from clients.runs.directory import replace_file

_SLUG_CHARS = 40
_HASH_CHARS = 6


def run_ids(kind: str, name: str) -> Iterator[str]:
    """Yield possible ids of a new run, such as `on-policy-qwen3-0.6b-7f3a`, without end.

    The caller takes the first id that is not used yet.
    """
    slug = re.sub(r"[^a-z0-9.]+", "-", name.lower())[:_SLUG_CHARS].strip("-.")
    # A name without Latin letters and digits: jobs of one name have the same hash.
    slug = slug or hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:_HASH_CHARS]
    digits = 2
    while True:
        yield f"{kind.replace('_', '-')}-{slug}-{secrets.token_hex(digits)}"
        # After a collision use more digits: with many jobs of one name, few short ids are free.
        digits = 4


def run_identity(run: Path) -> str:
    """Return a text NAME-HEX that identifies a run directory.

    A copy of the directory, or a new directory in its place, has another identity. The first call
    writes the file `.identity`, so only one process at a time may call this function.
    """
    path = run / ".identity"
    if not path.exists():
        replace_file(path, secrets.token_hex(16))
    with open_regular(path) as file:
        token = file.read(64)
    return f"{run.name[:100]}-{hashlib.sha256(token + bytes(run.absolute())).hexdigest()[:16]}"


def first_difference(
    left: Mapping[str, Any], right: Mapping[str, Any]
) -> tuple[str, Any, Any] | None:
    """Return the first key whose values differ, and both values: (key, left value, right value).

    `left`, `right`: two jobs as nested dicts. The key is a path such as `train.learning_rate`. If
    only one job has the key, the other value is None. Returns None if the jobs are equal.
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

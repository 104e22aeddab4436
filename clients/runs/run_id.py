"""Ids of jobs and run directories: the method, the job's name, and random digits."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator

_SLUG_CHARS = 40


def run_ids(kind: str, name: str) -> Iterator[str]:
    """Yield candidate ids such as `on-policy-qwen3-0.6b-7f3a`, without end.

    The caller takes the first one that is not in use.
    """
    slug = re.sub(r"[^a-z0-9.]+", "-", name.lower())[:_SLUG_CHARS].strip("-.") or "job"
    digits = 2
    while True:
        yield f"{kind.replace('_', '-')}-{slug}-{secrets.token_hex(digits)}"
        # After a collision use more digits: with many jobs of one name, few short ids are free.
        digits = 4

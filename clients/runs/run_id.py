"""Ids of jobs and run directories: the method, the job's name, and random digits."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterator

_SLUG_CHARS = 40
_HASH_CHARS = 6


def run_ids(kind: str, name: str) -> Iterator[str]:
    """Yield candidate ids such as `on-policy-qwen3-0.6b-7f3a`, without end.

    The caller takes the first one that is not in use.
    """
    slug = re.sub(r"[^a-z0-9.]+", "-", name.lower())[:_SLUG_CHARS].strip("-.")
    # A name without Latin letters and digits: jobs of one name have the same hash.
    slug = slug or hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:_HASH_CHARS]
    digits = 2
    while True:
        yield f"{kind.replace('_', '-')}-{slug}-{secrets.token_hex(digits)}"
        # After a collision use more digits: with many jobs of one name, few short ids are free.
        digits = 4

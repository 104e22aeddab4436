"""Names of jobs and run directories: readable, and unique with a little patience."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator

_SLUG_CHARS = 40


def run_ids(kind: str, name: str) -> Iterator[str]:
    """`on-policy-qwen3-0.6b-7f3a`, and others for whoever finds it taken."""
    slug = re.sub(r"[^a-z0-9.]+", "-", name.lower())[:_SLUG_CHARS].strip("-.") or "job"
    digits = 2
    while True:
        yield f"{kind.replace('_', '-')}-{slug}-{secrets.token_hex(digits)}"
        # Many jobs of one name: rather a longer id than a search for the last free one.
        digits = 4

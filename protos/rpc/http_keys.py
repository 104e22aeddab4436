"""What callers of somebody else's HTTP server share: the header with the key, and Retry-After."""

from __future__ import annotations

import os
from collections.abc import Mapping

from protos.errors import InvalidInput

_LONGEST_PAUSE_SECONDS = 60.0


def key_header(variable: str) -> dict[str, str]:
    """Return the header with the key in an environment variable; {} if it is not set.

    Space around the key, as a file has at its end, is left out. Raises InvalidInput, without the
    key, if no header can have it.
    """
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise InvalidInput(
            f"${variable} has characters that no key has", hint="check how it was copied"
        )
    return {"Authorization": f"Bearer {key}"} if key else {}


def retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds of Retry-After, at most 60; 0 if it is missing or a date."""
    try:
        return min(max(float(headers.get("Retry-After", "0")), 0.0), _LONGEST_PAUSE_SECONDS)
    except ValueError:
        return 0.0

"""Scoped tokens: one per attempt of a job, derived from a parent token.

    scoped.JOB.ATTEMPT.TAG      for teachers
    rollouts.JOB.ATTEMPT.TAG    for rollout services

TAG is the HMAC-SHA256 of the preceding text, in hex; the key is derived from the parent token. A
server with the parent token recomputes the tag, so scoped tokens are never stored, and a new parent
token invalidates all scoped tokens.

A token for teachers allows reading a teacher's info, vocabulary and rows, for any role of the
parent. A token for rollout services needs a parent of role admin; the token allows reading a
rollout service's info, and sampling if the attempt is not 0. Scoped tokens allow no other calls
(see `access.py`).
"""

from __future__ import annotations

import hmac
import re

_TOKEN_PATTERN = re.compile(
    r"((?:scoped|rollouts)\.([a-z0-9.-]{1,200}\.[0-9]{1,9}))\.([0-9a-f]{64})"
)
# With this text, the signing key differs from the stored digest of a token, and neither can be
# computed from the other.
_PURPOSE = b"distill scoped token 1"


def signing_key(token: str) -> bytes:
    """Return the key that signs tags. The token cannot be recovered from the key."""
    return hmac.digest(token.encode("utf-8", "surrogatepass"), _PURPOSE, "sha256")


def scoped_token(parent: str, job: str, attempt: int, *, rollouts: bool = False) -> str:
    """Return the scoped token of one attempt for teachers or, with `rollouts`, rollout services.

    `job` is a job id: 1 to 200 characters of a-z, 0-9, "." and "-".
    """
    text = f"{'rollouts' if rollouts else 'scoped'}.{job}.{attempt}"
    token = f"{text}.{_compute_tag(signing_key(parent), text).hex()}"
    assert _TOKEN_PATTERN.fullmatch(token), "the job id has invalid characters"
    return token


def parts_of(token: str) -> tuple[str, str, bytes] | None:
    """Split a scoped token into its signed text, `JOB.ATTEMPT` and tag; None if malformed."""
    match = _TOKEN_PATTERN.fullmatch(token)
    return None if match is None else (match[1], match[2], bytes.fromhex(match[3]))


def is_signed(key: bytes, text: str, tag: bytes) -> bool:
    """Return True if `tag` signs `text`. The time does not depend on which part is wrong."""
    return hmac.compare_digest(_compute_tag(key, text), tag)


def _compute_tag(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")

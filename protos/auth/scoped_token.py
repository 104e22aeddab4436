"""Scoped tokens: one per attempt of a job, derived from a parent token.

    scoped.JOB.ATTEMPT.TAG      for teachers
    rollouts.JOB.ATTEMPT.TAG    for rollout services

TAG is the HMAC-SHA256 of the text before it, in hex. Its key is derived from the parent token. A
server that has the parent token computes the tag again, so no server stores scoped tokens. After a
change of the parent token, all its scoped tokens are invalid.

A token for teachers can have a parent of any role. It allows a caller to read a teacher's info,
vocabulary and rows. A token for rollout services needs a parent of role admin. It allows a caller
to read the service's info and, if the attempt is not 0, to sample. Scoped tokens allow no other
calls (see `access.py`).
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
    """Return the key that signs the tags of scoped tokens. `token`: the parent token.

    The token cannot be computed from the key.
    """
    return hmac.digest(token.encode("utf-8", "surrogatepass"), _PURPOSE, "sha256")


def scoped_token(parent: str, job: str, attempt: int, *, rollouts: bool = False) -> str:
    """Return the scoped token of one attempt: for teachers or, with `rollouts`, for rollout
    services.

    `parent`: the parent token. `job`: a job id of 1 to 200 characters a-z, 0-9, "." and "-".
    """
    text = f"{'rollouts' if rollouts else 'scoped'}.{job}.{attempt}"
    token = f"{text}.{_compute_tag(signing_key(parent), text).hex()}"
    assert _TOKEN_PATTERN.fullmatch(token), "the job id has invalid characters"
    return token


def parts_of(token: str) -> tuple[str, str, bytes] | None:
    """Split a scoped token into three parts; return None if it is not a scoped token.

    The parts are the text that the tag signs, the scope `JOB.ATTEMPT`, and the tag.
    """
    match = _TOKEN_PATTERN.fullmatch(token)
    return None if match is None else (match[1], match[2], bytes.fromhex(match[3]))


def is_signed(key: bytes, text: str, tag: bytes) -> bool:
    """Return True if `tag` is the signature of `text` with `key`.

    The duration of the check does not depend on the wrong part of a tag. A caller who measures it
    can therefore not find the tag part by part.
    """
    return hmac.compare_digest(_compute_tag(key, text), tag)


def _compute_tag(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")

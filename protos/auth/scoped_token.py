"""Tokens for one attempt at a job, which a server derives from its own: good for asking teachers.

    scoped.JOB.ATTEMPT.TAG      TAG: HMAC-SHA256 in hex, under a key made of the parent token,
                                of the text before it

Who knows the parent makes the same tag, so nothing is stored anywhere, and changing the parent ends
them all. Whatever the parent may do, they may ask a teacher what it is and for rows (`access.py`).
"""

from __future__ import annotations

import hmac
import re

_FORM = re.compile(r"(scoped\.([a-z0-9.-]{1,200}\.[0-9]{1,9}))\.([0-9a-f]{64})")
# Not the digest that a server finds its tokens by: neither can be made from the other.
_PURPOSE = b"distill scoped token 1"


def signing_key(token: str) -> bytes:
    """What tags are made with; it does not tell the token."""
    return hmac.digest(token.encode("utf-8", "surrogatepass"), _PURPOSE, "sha256")


def scoped_token(parent: str, job: str, attempt: int) -> str:
    """The token of one attempt. `job`: of a-z, 0-9, "." and "-", as ids are."""
    text = f"scoped.{job}.{attempt}"
    token = f"{text}.{_tag(signing_key(parent), text).hex()}"
    assert _FORM.fullmatch(token), "ids are made by the server"
    return token


def parts_of(token: str) -> tuple[str, str, bytes] | None:
    """The text that was signed, `JOB.ATTEMPT` and the tag; None for what is not of the form."""
    found = _FORM.fullmatch(token)
    return None if found is None else (found[1], found[2], bytes.fromhex(found[3]))


def is_signed(key: bytes, text: str, tag: bytes) -> bool:
    """Takes the same time whatever part of the tag is wrong."""
    return hmac.compare_digest(_tag(key, text), tag)


def _tag(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")

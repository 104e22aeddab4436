"""The token with which an attempt calls its teachers."""

from __future__ import annotations

from protos.auth.scoped_token import scoped_token
from protos.rpc.channel import TEACHER_TOKEN, token_of


def teacher_token(job_id: str, attempt: int) -> dict[str, str]:
    """Return {"DISTILL_TEACHER_TOKEN": token} for one attempt, or {} if the server has no token.

    The token is scoped to the attempt and derived from the server's own at each start, so a token
    that is replaced in the server's file takes effect with the next attempt. Raises InvalidInput if
    the file cannot be read.
    """
    parent = token_of(TEACHER_TOKEN)
    return {TEACHER_TOKEN: scoped_token(parent, job_id, attempt)} if parent else {}

"""The token that an attempt at a job has for its teachers."""

from __future__ import annotations

from protos.auth.scoped_token import scoped_token
from protos.rpc.channel import TEACHER_TOKEN, token_of


def teacher_token(job_id: str, attempt: int) -> dict[str, str]:
    """$DISTILL_TEACHER_TOKEN of one attempt, derived from this server's; empty where it has none.

    Made at each start, so that a new token in the server's file is the parent of the next ones.
    Raises InvalidInput for a file that cannot be read.
    """
    parent = token_of(TEACHER_TOKEN)
    return {TEACHER_TOKEN: scoped_token(parent, job_id, attempt)} if parent else {}

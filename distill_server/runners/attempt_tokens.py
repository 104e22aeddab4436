"""The tokens with which an attempt calls its teachers and its rollout services."""

from __future__ import annotations

from protos.auth.scoped_token import scoped_token
from protos.rpc.channel import ROLLOUTS_TOKEN, TEACHER_TOKEN, token_of


def attempt_tokens(job_id: str, attempt: int) -> dict[str, str]:
    """Return $DISTILL_TEACHER_TOKEN and $DISTILL_ROLLOUTS_TOKEN of one attempt.

    A token that the server does not have is left out. Each is scoped to the attempt and derived
    from the server's own at each start, so a token that is replaced in the server's file takes
    effect with the next attempt. Raises InvalidInput if a file cannot be read.
    """
    parents = {name: token_of(name) for name in (TEACHER_TOKEN, ROLLOUTS_TOKEN)}
    return {
        name: scoped_token(parent, job_id, attempt, rollouts=name == ROLLOUTS_TOKEN)
        for name, parent in parents.items()
        if parent
    }

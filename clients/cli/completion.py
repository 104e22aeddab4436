"""What a shell completes besides commands and options: the ids of jobs."""

from __future__ import annotations

from contextlib import suppress

import typer

from protos.errors import DistillError

# Somebody waits at a prompt: rather no ids than a wait.
_SECONDS = 0.5
_MOST_JOBS = 200


def complete_job(context: typer.Context, incomplete: str) -> list[str]:
    """Ids on the server that begin so, newest first; none where it does not answer at once."""
    from clients.jobs.client import DistillClient

    found = ["@last"]
    server = context.find_root().params["server"]
    with suppress(DistillError), DistillClient(server, timeout=_SECONDS) as client:
        found += [job.id for job in client.list(limit=_MOST_JOBS)]
    return [name for name in found if name.startswith(incomplete)]

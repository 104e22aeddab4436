"""Shell completion of job ids; commands and options are completed by typer."""

from __future__ import annotations

from contextlib import suppress

import typer

from protos.errors import DistillError

# The user waits at the prompt: after this time return no ids.
_SECONDS = 0.5
_MAX_JOBS = 200


def complete_job(context: typer.Context, incomplete: str) -> list[str]:
    """Return "@last" and the server's job ids that start with `incomplete`, newest first.

    Returns no ids if the server does not answer within 0.5 s. Considers the 200 newest jobs.
    """
    from clients.jobs.client import DistillClient

    names = ["@last"]
    server = context.find_root().params["server"]
    with suppress(DistillError), DistillClient(server, timeout=_SECONDS) as client:
        names += [job.id for job in client.list(limit=_MAX_JOBS)]
    return [name for name in names if name.startswith(incomplete)]

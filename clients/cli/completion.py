"""Completion on the command line: ids, labels and metrics of jobs on the server, and keys of job
files.

Each function returns the words that start with `incomplete`. Words about jobs come from the 200
newest jobs of the server. If the server does not answer within 0.5 s, there are no words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import typer

from protos.errors import DistillError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from clients.jobs.job import Job

# The user waits at the prompt.
_SECONDS = 0.5
_MAX_JOBS = 200


def complete_job(context: typer.Context, incomplete: str) -> list[str]:
    """Return "@last" and job ids, newest first."""
    names = ["@last", *(job.id for job in _newest_jobs(context))]
    return [name for name in names if name.startswith(incomplete)]


def complete_label(context: typer.Context, incomplete: str) -> list[str]:
    """Return the labels of jobs as NAME=VALUE."""
    pairs = {f"{name}={text}" for job in _newest_jobs(context) for name, text in job.labels.items()}
    return sorted(pair for pair in pairs if pair.startswith(incomplete))


def complete_metric(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the metrics in the newest step of each job."""
    names = {name for job in _newest_jobs(context) for name in job.metrics}
    return sorted(name for name in names if name.startswith(incomplete))


def complete_key(incomplete: str) -> list[str]:
    """Return the keys of job files for all methods, such as `train.learning_rate=`."""
    from clients.config.kinds import KINDS

    keys = {f"{key}=" for kind in KINDS.values() for key in _iter_keys(kind)}
    return sorted(key for key in keys if key.startswith(incomplete))


def _iter_keys(table: type[BaseModel], prefix: str = "") -> Iterator[str]:
    from clients.config.problems import table_in

    for name, field in table.model_fields.items():
        nested_table = table_in(field)
        if nested_table is None:
            yield prefix + name
        else:
            yield from _iter_keys(nested_table, f"{prefix}{name}.")


def _newest_jobs(context: typer.Context) -> Sequence[Job]:
    from clients.jobs.client import DistillClient

    server = context.find_root().params["server"]
    with suppress(DistillError), DistillClient(server, timeout=_SECONDS) as client:
        return client.list(limit=_MAX_JOBS)
    return ()

"""Conversion of the rows of the database, and the condition of a search."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from clients.jobs.job import Job, JobState
from distill_server.runners.machine import Share


def having(search: str) -> tuple[str, dict[str, str]]:
    """Return an SQL condition on jobs and its parameters; ASCII letters match in both cases."""
    words = {f"word{number}": word for number, word in enumerate(search.split())}
    text = "lower(id || ' ' || name || ' ' || state)"
    return " AND ".join(["1", *(f"instr({text}, lower(:{name}))" for name in words)]), words


def job_of(row: sqlite3.Row) -> Job:
    """Convert a whole row of the table jobs."""
    values = typed(row)
    for name in ("number", "place", "priority", "queued_at"):
        del values[name]
    return Job(**values)


def share_of(row: sqlite3.Row) -> Share:
    """Convert the columns cpus and gpus of an attempt."""
    gpus = row["gpus"]
    return Share(row["cpus"], None if gpus is None else tuple(filter(None, gpus.split(","))))


def typed(row: sqlite3.Row) -> dict[str, Any]:
    """Return the values of a job or an event, with its state and its metrics parsed."""
    values = dict(row)
    return {
        **values,
        "state": JobState(values["state"]),
        "metrics": json.loads(values["metrics"]),
    }

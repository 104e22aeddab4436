"""Conversion of jobs and events to JSON records, and of errors to HTTP responses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from clients.jobs.job import Job, JobEvent
from distill_server.jobs.extremes import Extremes
from protos.errors import DistillError
from protos.rpc.http_server import HTTP_STATUS
from protos.rpc.statuses import public_error

_EVENT_COLUMNS = [field.name for field in fields(JobEvent) if field.name != "metrics"]


def job_record(job: Job, *, with_config: bool = False) -> dict[str, Any]:
    """Return a job as a JSON record; `with_config` adds the configuration as an object."""
    record = asdict(job)
    config = json.loads(record.pop("config_json"))
    del record["checkpoints"], record["dependencies"]
    return {**record, "config": config} if with_config else record


def event_columns(events: Sequence[JobEvent]) -> dict[str, Any]:
    """Return events of a job as a JSON record of columns, which is smaller than a list of records.

    Each field of JobEvent is a list; `metrics` has a list by name, with null where an event lacks
    the metric. Metrics have seven significant digits.
    """
    names = dict.fromkeys(name for event in events for name in event.metrics)
    return {
        **{name: [getattr(event, name) for event in events] for name in _EVENT_COLUMNS},
        "metrics": {
            name: [_shorten(event.metrics.get(name)) for event in events] for name in names
        },
    }


def extremes_record(extremes: Extremes) -> dict[str, Any]:
    """Return the extreme values of a job's deleted events as a JSON record."""
    curves = {
        name: {
            "steps": [step for step, _ in points],
            "values": [_shorten(value) for _, value in points],
        }
        for name, points in extremes.curves.items()
    }
    return {"attempt": extremes.attempt, "curves": curves}


def _shorten(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.7g}")


def fault_record(fault: DistillError) -> dict[str, Any]:
    """Return an error as a JSON record, with the same keys as in `distill --json`."""
    return {
        "code": fault.code,
        "message": fault.message,
        "field": fault.field,
        "hint": fault.hint,
    }


def fault_answer(fault: DistillError) -> Response:
    """Return the HTTP response for an error: its record, and the HTTP status of its code.

    A code without a status of its own gets 500.
    """
    status = HTTP_STATUS.get(fault.code, 500)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": fault_record(fault)}, status, headers)


async def on_error(request: Request, error: Exception) -> Response:
    """Return the HTTP response to an exception in a request (the application's error handler).

    The response to a DistillError has its message. The response to any other error has only an id,
    which is also in the server's log.
    """
    return fault_answer(public_error(error, request.url.path))

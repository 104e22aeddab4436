"""Conversion of jobs and events to JSON records, and of errors to HTTP responses."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from clients.jobs.job import Job, JobEvent
from protos.errors import DistillError
from protos.rpc.http_server import HTTP_STATUS
from protos.rpc.statuses import public_error


def job_record(job: Job, *, with_config: bool = False) -> dict[str, Any]:
    """Return a job as a JSON record; `with_config` adds the configuration as an object."""
    record = asdict(job)
    config = json.loads(record.pop("config_json"))
    del record["checkpoints"], record["dependencies"]
    return {**record, "config": config} if with_config else record


def event_record(event: JobEvent) -> dict[str, Any]:
    """Return an event of a job as a JSON record."""
    return asdict(event)


def fault_record(fault: DistillError) -> dict[str, Any]:
    """Return an error as a JSON record, with the same keys as in `distill --json`."""
    return {
        "code": fault.code,
        "message": fault.message,
        "field": fault.field,
        "hint": fault.hint,
    }


def fault_answer(fault: DistillError) -> Response:
    """Return an HTTP response with the error's record and the status of its code, else 500."""
    status = HTTP_STATUS.get(fault.code, 500)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": fault_record(fault)}, status, headers)


async def on_error(request: Request, error: Exception) -> Response:
    """The application's error handler.

    The response to a DistillError has its message. The response to any other error has only an id,
    which is also in the server's log.
    """
    return fault_answer(public_error(error, request.url.path))

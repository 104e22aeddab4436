"""Values of the server as JSON, and its faults as HTTP."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from clients.jobs.job import Job, JobEvent
from protos.errors import DistillError, ErrorCode
from protos.rpc.statuses import public_error

_STATUS = {
    ErrorCode.INVALID_ARGUMENT: 400,
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.PERMISSION_DENIED: 403,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.FAILED_PRECONDITION: 409,
    ErrorCode.RESOURCE_EXHAUSTED: 429,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.DEADLINE_EXCEEDED: 504,
}


def job_record(job: Job, *, with_config: bool = False) -> dict[str, Any]:
    """A job as the pages read it; `config` is an object."""
    record = asdict(job)
    config = json.loads(record.pop("config_json"))
    del record["checkpoints"]
    return {**record, "config": config} if with_config else record


def event_record(event: JobEvent) -> dict[str, Any]:
    return asdict(event)


def fault_record(fault: DistillError) -> dict[str, Any]:
    """As `distill --json` tells it."""
    return {
        "code": fault.code,
        "message": fault.message,
        "field": fault.field,
        "hint": fault.hint,
    }


def fault_answer(fault: DistillError) -> Response:
    status = _STATUS.get(fault.code, 500)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": fault_record(fault)}, status, headers)


async def on_error(request: Request, error: Exception) -> Response:
    """For the application: a fault as it is, a defect as an id that is also in the log."""
    return fault_answer(public_error(error, request.url.path))

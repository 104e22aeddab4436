"""Errors as HTTP responses, in the format of vLLM."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from protos.errors import DistillError, ErrorCode, NotFound
from protos.rpc.http_server import HTTP_STATUS
from protos.rpc.statuses import public_error

# Use 503 in place of 429: clients retry a request after a status of 5xx, and end the training at
# once after any other status.
_STATUS = {**HTTP_STATUS, ErrorCode.RESOURCE_EXHAUSTED: 503}
_RETRY_SECONDS = 1


def fault_answer(fault: DistillError, status: int | None = None) -> Response:
    """Return the HTTP response for an error: its message, its field and the status of its code."""
    status = status or _STATUS.get(fault.code, 500)
    headers = {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 503:
        headers["Retry-After"] = str(_RETRY_SECONDS)
    error = {
        "message": str(fault),
        "type": str(fault.code),
        "param": fault.field or None,
        "code": status,
    }
    return JSONResponse({"error": error}, status, headers)


async def on_error(request: Request, error: Exception) -> Response:
    """Return the HTTP response to an exception in a request (the application's error handler).

    `public_error` decides what a client may read of an error that is not a DistillError.
    """
    return fault_answer(public_error(error, request.url.path))


async def on_http_error(request: Request, error: Exception) -> Response:
    """Return the HTTP response to a request for an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    path = f"{request.method} {request.url.path}"
    hint = "the pages are /v1/models, /v1/completions, /inference/v1/generate, /health and /metrics"
    return fault_answer(NotFound(f"{path}: no such page", hint=hint), error.status_code)

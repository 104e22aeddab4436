"""The decorator of gRPC methods that change something: writes each call to the audit log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, Protocol, TypeVar

from distill_server.people.audit import Audit
from protos.auth.access import Caller

_Reply = TypeVar("_Reply")


class Service(Protocol):
    """A service with an audit log."""

    audit: Audit

    def caller(self, context: Any) -> Caller:
        """Return the caller of the current call."""


_RpcMethod = Callable[[Any, Any, Any], Awaitable[_Reply]]


def audited(method: _RpcMethod[_Reply]) -> _RpcMethod[_Reply]:
    """Write each call of the method to the audit log, with its caller and its outcome.

    Requests that only check jobs change nothing and are not logged.
    """

    @wraps(method)
    async def write_audited(service: Service, request: Any, context: Any) -> _Reply:
        if getattr(request, "check_only", False):
            return await method(service, request, context)
        name, caller = method.__name__, service.caller(context)
        with service.audit.entry(name, caller, context.peer(), *_collect_names(request)) as entry:
            reply = await method(service, request, context)
            entry.about = _collect_names(reply) or entry.about
            return reply

    return write_audited


def _collect_names(message: Any) -> tuple[str, ...]:
    """Return the names in a request or a reply: ids of jobs, a teacher's key, or a path."""
    jobs = [job.id for job in getattr(message, "jobs", ()) if hasattr(job, "id")]
    names = (getattr(message, field, "") for field in ("job_id", "id", "key", "path"))
    return (*jobs, *filter(None, names))

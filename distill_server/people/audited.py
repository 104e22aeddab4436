"""The decorator of gRPC methods that change something: a call is a line of the audit log."""

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
        """Return who makes the call."""


_Method = Callable[[Any, Any, Any], Awaitable[_Reply]]


def audited(method: _Method[_Reply]) -> _Method[_Reply]:
    """Make the method write what it did, for whom, and how it ended.

    A request that only checks jobs changes nothing, and has no line.
    """

    @wraps(method)
    async def call(service: Service, request: Any, context: Any) -> _Reply:
        if getattr(request, "check_only", False):
            return await method(service, request, context)
        name, caller = method.__name__, service.caller(context)
        with service.audit.entry(name, caller, context.peer(), *_named(request)) as entry:
            reply = await method(service, request, context)
            entry.about = _named(reply) or entry.about
            return reply

    return call


def _named(message: Any) -> tuple[str, ...]:
    """Return what a request or a reply is about: ids of jobs, a teacher's key, or a path."""
    jobs = [job.id for job in getattr(message, "jobs", ()) if hasattr(job, "id")]
    names = (getattr(message, field, "") for field in ("job_id", "id", "key", "path"))
    return (*jobs, *filter(None, names))

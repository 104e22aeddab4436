"""The audit log of a server: one line of JSON for each request that changes something.

The server writes the line before it answers the caller. A line has no text of jobs and no tokens.
The file is opened for each line, so it can be moved at any time.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Protocol, TypeVar

from protos.auth.access import Caller
from protos.errors import DistillError

log = logging.getLogger(__name__)

AUDIT_FILE = "audit.jsonl"
# Limits for the names in a line; a name in a request can be as long as the message.
_MAX_NAMES, _MAX_NAME_CHARS = 100, 200


@dataclass
class Entry:
    """The objects of a request: ids of jobs, the key of a teacher, the path of an upload."""

    about: tuple[str, ...] = ()


class Audit:
    """Appends to the audit log at `path`; None: no log. Call all methods on the event loop."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @contextmanager
    def entry(
        self, action: str, caller: Caller | None, peer: str = "", *about: str
    ) -> Iterator[Entry]:
        """Write one line at the end of the block, with the error of the block, if any.

        `caller` None means the server itself. `about` are the names in the request; the block
        replaces them by the ids of the objects.
        """
        entry = Entry(about)
        outcome = "INTERNAL"
        try:
            yield entry
            outcome = "OK"
        except DistillError as error:
            outcome = error.code.value
            raise
        finally:
            self._write_line(action, caller, peer, entry.about, outcome)

    def _write_line(
        self,
        action: str,
        caller: Caller | None,
        peer: str,
        about: tuple[str, ...],
        outcome: str,
    ) -> None:
        if self._path is None:
            return
        caller_fields = {"by": "server"} if caller is None else _describe_caller(caller, peer)
        record = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **caller_fields,
            "action": action,
            "about": [name[:_MAX_NAME_CHARS] for name in about[:_MAX_NAMES]],
            "outcome": outcome,
        }
        try:
            _append_line(self._path, json.dumps(record) + "\n")
        except OSError:
            # A full disk must not prevent the cancellation of a job.
            log.exception("cannot write to the audit log: %s", json.dumps(record))


def _describe_caller(caller: Caller, peer: str) -> dict[str, str]:
    return {
        "by": caller.owner,
        "token": caller.token,
        "role": caller.role.name.lower(),
        "from": peer,
    }


def _append_line(path: Path, line: str) -> None:
    """Append a line durably, in one write, so that lines never mix."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


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
    """Return the names in a request or a reply: ids of jobs, or a path."""
    jobs = [job.id for job in getattr(message, "jobs", ()) if hasattr(job, "id")]
    names = (getattr(message, field, "") for field in ("job_id", "id", "path"))
    return (*jobs, *filter(None, names))

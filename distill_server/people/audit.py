"""The audit log of a server, a file with one line of JSON per logged request.

Logged are requests that change something, downloads, and calls that are refused for their tokens.
The server writes the line before it answers the caller. A line has no text of jobs and no tokens.
The file is opened for each line, so it can be moved at any time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Protocol, TypeVar

from protos.auth.access import Caller, Tokens, name_of_token
from protos.errors import DistillError, ErrorCode

log = logging.getLogger(__name__)

AUDIT_FILE = "audit.jsonl"
# Limits for the names in a line; a name in a request can be as long as the message.
_MAX_NAMES, _MAX_NAME_CHARS = 100, 200
# Anybody can make calls that are refused, so their lines are few.
_MAX_REFUSAL_LINES, _MINUTE_SECONDS = 60, 60.0


@dataclass
class Entry:
    """The line that a block writes to the audit log.

    `about` has the objects of the request: ids of jobs, the key of a teacher, or the path of an
    upload.
    """

    about: tuple[str, ...] = ()


class Audit:
    """Appends lines to the file `path`; None: no audit log. Call all methods on the event loop."""

    def __init__(self, path: Path | None, tokens: Tokens | None = None) -> None:
        """`tokens` are the server's tokens, which give the names of refused callers."""
        self._path = path
        self._tokens = tokens or Tokens()
        self.refusals: Counter[str] = Counter()  # by error code
        self._minute_start = -_MINUTE_SECONDS
        self._refusal_lines = self._unlisted_refusals = 0

    @contextmanager
    def entry(
        self, action: str, caller: Caller | None, peer: str = "", *about: str
    ) -> Iterator[Entry]:
        """Write one line at the end of the block, with its outcome: OK or an error code.

        `caller` None means the server itself. `about` are the names of objects in the request. The
        block sets `about` of the yielded entry to the ids of these objects.
        """
        entry = Entry(about)
        outcome = "INTERNAL"
        try:
            yield entry
            outcome = "OK"
        except DistillError as error:
            outcome = error.code.value
            raise
        except (asyncio.CancelledError, GeneratorExit):  # the client has given up
            outcome = "CANCELLED"
            raise
        finally:
            caller_fields = {"by": "server"} if caller is None else _describe_caller(caller, peer)
            self._write_line(caller_fields, action, entry.about, outcome)

    def record_refusal(self, action: str, metadata: Any, peer: str, error: DistillError) -> None:
        """Write a line for a call that was refused for its token, at most 60 lines a minute.

        `metadata` has the headers of the call. If calls were refused without a line, the next line
        has their number.
        """
        self.refusals[error.code.value] += 1
        now = time.monotonic()
        if now - self._minute_start >= _MINUTE_SECONDS:
            self._minute_start, self._refusal_lines = now, 0
        if self._refusal_lines >= _MAX_REFUSAL_LINES:
            self._unlisted_refusals += 1
            return
        self._refusal_lines += 1
        fields = _describe_caller(self._tokens.caller_in(metadata), peer)
        fields |= {"token": name_of_token(metadata)}
        if error.code is ErrorCode.UNAUTHENTICATED:
            fields |= {"by": "", "role": ""}
        self._write_line(fields, action, (), error.code.value, self._unlisted_refusals)
        self._unlisted_refusals = 0

    def _write_line(
        self,
        caller_fields: Mapping[str, str],
        action: str,
        about: tuple[str, ...],
        outcome: str,
        unlisted_refusals: int = 0,
    ) -> None:
        if self._path is None:
            return
        record: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **caller_fields,
            "action": action,
            "about": [name[:_MAX_NAME_CHARS] for name in about[:_MAX_NAMES]],
            "outcome": outcome,
        }
        if unlisted_refusals:
            record["unlisted_refusals"] = unlisted_refusals
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

    def job_id_of(self, text: str) -> str:
        """Return the id of the job that `text` names, or `text` if there is none."""


_RpcMethod = Callable[[Any, Any, Any], Awaitable[_Reply]]
_StreamMethod = Callable[[Any, Any, Any], AsyncIterator[_Reply]]


def audited(method: _RpcMethod[_Reply]) -> _RpcMethod[_Reply]:
    """Write each call of the method to the audit log, with its caller and its outcome.

    Requests that only check jobs change nothing and are not logged.
    """

    @wraps(method)
    async def write_audited(service: Service, request: Any, context: Any) -> _Reply:
        if getattr(request, "check_only", False):
            return await method(service, request, context)
        with _entry_of(service, method.__name__, request, context) as entry:
            reply = await method(service, request, context)
            entry.about = _collect_names(reply) or entry.about
            return reply

    return write_audited


def audited_stream(method: _StreamMethod[_Reply]) -> _StreamMethod[_Reply]:
    """Write each call of the method to the audit log at its end, as `audited` does."""

    @wraps(method)
    async def write_audited(service: Service, request: Any, context: Any) -> AsyncIterator[_Reply]:
        with _entry_of(service, method.__name__, request, context):
            async for message in method(service, request, context):
                yield message

    return write_audited


def _entry_of(
    service: Service, action: str, request: Any, context: Any
) -> AbstractContextManager[Entry]:
    # Log the id of the job, also if the call is refused: "@last" may later mean another job.
    names = [service.job_id_of(text) for text in _collect_names(request)]
    return service.audit.entry(action, service.caller(context), context.peer(), *names)


def _collect_names(message: Any) -> tuple[str, ...]:
    """Return the names in a request or a reply: ids of jobs, or a path."""
    jobs = [job.id for job in getattr(message, "jobs", ()) if hasattr(job, "id")]
    names = (getattr(message, field, "") for field in ("job_id", "id", "path"))
    return (*jobs, *filter(None, names))

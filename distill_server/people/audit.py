"""The audit log of a server: one line of JSON for each request that changes something.

A line is written before the caller gets the answer. It has no text of jobs and no tokens. The file
is opened for each line, so that it can be moved away at any time.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from protos.auth.access import Caller
from protos.errors import DistillError

log = logging.getLogger(__name__)

AUDIT_FILE = "audit.jsonl"
# Of what a request names; a name can be as long as a message.
_MOST_NAMED, _MOST_CHARS = 100, 200


@dataclass
class Entry:
    """What a request is about: ids of jobs, the key of a teacher, the path of an upload."""

    about: tuple[str, ...] = ()


class Audit:
    """Appends to the audit log at `path`; None writes none. Call all methods on the event loop."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @contextmanager
    def entry(
        self, action: str, caller: Caller | None, peer: str = "", *about: str
    ) -> Iterator[Entry]:
        """Write one line at the end of the block, with the error that leaves it, if one does.

        `caller` None stands for the server itself. `about` is what the request names; the block
        replaces it by what was found or made.
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
            self._write(action, caller, peer, entry.about, outcome)

    def _write(
        self,
        action: str,
        caller: Caller | None,
        peer: str,
        about: tuple[str, ...],
        outcome: str,
    ) -> None:
        if self._path is None:
            return
        who = {"by": "server"} if caller is None else _who(caller, peer)
        record = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **who,
            "action": action,
            "about": [one[:_MOST_CHARS] for one in about[:_MOST_NAMED]],
            "outcome": outcome,
        }
        try:
            _append(self._path, json.dumps(record) + "\n")
        except OSError:
            # A full disk must not keep anybody from cancelling a job.
            log.exception("cannot write to the audit log: %s", json.dumps(record))


def _who(caller: Caller, peer: str) -> dict[str, str]:
    return {
        "by": caller.owner,
        "token": caller.token,
        "role": caller.role.name.lower(),
        "from": peer,
    }


def _append(path: Path, line: str) -> None:
    """Append a line durably, in one write, so that lines never mix."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)

"""Binds a directory of runs to one job database.

RUNS/.server.lock   locked by the server or import that uses the directory
     .server.json   id and path of the job database whose jobs the directory holds

Without the binding, a server with another database would delete uploads that its own jobs do not
name, and stop the teachers of the other server.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clients.data.outside import open_regular
from clients.runs.directory import SERVER_RECORD, replace_file
from clients.runs.file_system import lock_file
from protos.errors import WrongState

_LOCK = ".server.lock"


@contextmanager
def own_runs(
    runs: Path, database: Path, connection: sqlite3.Connection, *, take_over: bool = False
) -> Iterator[None]:
    """Hold the directory `runs` for the open database while the block runs.

    The first database that uses the directory becomes its owner. With `take_over`, this database
    becomes the owner even if the directory has another owner, such as a database that is lost.

    Raises WrongState if another server uses the directory or, without `take_over`, if the directory
    belongs to another database; InvalidInput if the file system has no locks.
    """
    with exclusive_lock(runs / _LOCK):
        (database_id,) = connection.execute("SELECT id FROM server").fetchone()
        owner_id, owner_path = _read_owner(runs / SERVER_RECORD)
        if owner_id != database_id:
            if owner_id is not None and not take_over:
                raise WrongState(
                    f"{runs} belongs to another job database ({owner_path})",
                    field="--runs",
                    hint="start the server with that --database or another --runs; if that"
                    f" database is lost, run distill-server --import {runs} with these options",
                )
            record = {"database_id": database_id, "database": os.path.abspath(database)}
            replace_file(runs / SERVER_RECORD, json.dumps(record) + "\n")
        yield


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`. Raises WrongState if another server holds it."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        try:
            lock_file(descriptor, path, wait=False)
        except BlockingIOError as error:
            raise WrongState(
                f"another server uses {path.parent}",
                hint="stop that server, or start this server with another --runs directory",
            ) from error
        yield
    finally:
        # Closing releases the lock. The file is not removed: after a removal, two servers could
        # lock two different files.
        os.close(descriptor)


def _read_owner(path: Path) -> tuple[str | None, str]:
    """Return the id and the path of the database that owns the directory.

    The id is None if the directory has no owner. If the record of the owner cannot be read, the id
    is "", and a sentence about this is in place of the path.
    """
    try:
        with open_regular(path) as file:
            record = json.loads(file.read(64 << 10))
        return str(record["database_id"]), str(record["database"])
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, KeyError, TypeError):
        return "", f"{path} cannot be read"

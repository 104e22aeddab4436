"""A copy of the job database, also of one that a server uses."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from protos.errors import InvalidInput, NotFound, Unavailable


def back_up(database: Path, copy: Path) -> None:
    """Write the current database to the new file `copy`, which appears when it is complete.

    The copy has every job that the server acknowledged before the call. The database is only
    read, so the server is not disturbed. Raises NotFound if there is no database,
    InvalidInput if `copy` exists, Unavailable if it cannot be written.
    """
    if not database.is_file():
        raise NotFound(f"no job database: {database}", field="--database", hint="see --runs")
    if copy.exists():
        raise InvalidInput(f"{copy} exists", field="--backup", hint="name a new file")
    partial = copy.with_name(f".{copy.name}.{os.getpid()}.tmp")
    try:
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        source = sqlite3.connect(database)
        with closing(source), closing(sqlite3.connect(partial)) as target:
            source.execute("PRAGMA query_only = ON")
            source.backup(target)
            # A single file, without the files of write-ahead logging.
            target.execute("PRAGMA journal_mode = DELETE")
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.rename(copy)
    except (OSError, sqlite3.Error) as error:
        raise Unavailable(
            f"cannot write {copy}: {error}", field="--backup", hint="check the disk"
        ) from error
    finally:
        partial.unlink(missing_ok=True)

"""Writes the files of an artifact to a new directory, and verifies them.

Removes partial results.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import BinaryIO

from clients.runs.file_system import fsync_directory
from protos import distill_pb2 as pb
from protos.errors import Corrupt, InvalidInput
from protos.operating_system import IS_WINDOWS

_COPIED_BYTES = 8 << 20


class Download:
    """A context manager that collects files in a temporary directory beside the destination.

    `finish` renames the temporary directory to the destination. If `finish` was not called, the
    temporary directory is removed on exit.
    """

    def __init__(self, destination: Path) -> None:
        """Raise InvalidInput if `destination` is a file or a directory that is not empty."""
        self._destination = destination.absolute()
        if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
            raise InvalidInput(
                f"{destination} is not an empty directory",
                field="destination",
                hint="name a directory that does not exist yet",
            )
        name = f".{self._destination.name}.{secrets.token_hex(4)}.partial"
        self._partial = self._destination.with_name(name)
        self._file: BinaryIO | None = None
        self._path = ""
        self._size = 0  # of the file `_path`, as far as it has arrived
        self._digest = hashlib.sha256()
        self._files = 0

    def __enter__(self) -> Download:
        self._partial.mkdir(parents=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
        shutil.rmtree(self._partial, ignore_errors=True)

    @property
    def position(self) -> tuple[str, int]:
        """The path of the newest file, and the number of its bytes so far; ("", 0) at first."""
        return self._path, self._size

    def restart(self) -> None:
        """Delete all received files."""
        if self._file is not None:
            self._file.close()
            self._file = None
        shutil.rmtree(self._partial)
        self._partial.mkdir()
        self._path, self._size, self._files = "", 0, 0

    def add(self, chunk: pb.ArtifactChunk) -> None:
        """Write the next chunk of a file.

        Raises Corrupt if chunks are missing or out of order, if the file does not match its
        checksum, or if its path leaves the directory.
        """
        if self._file is None and self._files and (chunk.path, chunk.offset) == self.position:
            return  # the end of a file that was complete when the connection broke
        if self._file is None:
            self._open(chunk.path)
        assert self._file is not None
        if chunk.path != self._path or chunk.offset != self._file.tell():
            raise Corrupt(f"{self._path}: a part is missing", hint="try again")
        self._file.write(chunk.data)
        self._digest.update(chunk.data)
        self._size += len(chunk.data)
        if chunk.last:
            self._close(chunk.sha256)

    def copy(self, root: Path) -> None:
        """Copy every file below the local directory `root` into the temporary directory."""
        for source in sorted(path for path in root.rglob("*") if path.is_file()):
            self._open(source.relative_to(root).as_posix())
            assert self._file is not None
            with source.open("rb") as file:
                shutil.copyfileobj(file, self._file, _COPIED_BYTES)
            self._sync()

    def finish(self) -> Path:
        """Move the directory to its destination, and return the destination.

        The files and the new name survive a power failure. Raises Corrupt if the last file is
        incomplete, or if there is no file.
        """
        if self._file is not None or self._files == 0:
            raise Corrupt("the download ended before the last file did", hint="try again")
        if self._destination.exists():  # empty; Windows replaces no directory
            self._destination.rmdir()
        self._partial.rename(self._destination)
        fsync_directory(self._destination.parent)
        return self._destination

    def _open(self, path: str) -> None:
        relative = PurePosixPath(path)
        is_outside = relative.is_absolute() or not relative.parts or ".." in relative.parts
        # On Windows, "a\\..\\..\\b" and "C:b" are such paths too.
        is_outside |= IS_WINDOWS and (":" in path or "\\" in path)
        if is_outside or "\0" in path:
            raise Corrupt(f"the server sent a path outside the artifact: {path!r}")
        target = self._partial / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        # Mode "x": a path that comes twice is an error.
        self._file = target.open("xb")
        self._path, self._size = path, 0
        self._digest = hashlib.sha256()

    def _close(self, sha256: str) -> None:
        self._sync()
        if self._digest.hexdigest() != sha256:
            raise Corrupt(f"{self._path} does not match its checksum", hint="try again")

    def _sync(self) -> None:
        """Flush the open file to disk and close it."""
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self._files += 1

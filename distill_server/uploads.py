"""The files that clients send for their jobs, in the directory .uploads of a server's --runs.

.uploads/files/SHA256   a file that has arrived whole and matches its name
         parts/SHA256   the first bytes of a file that has not
         DIGEST/NAME    a file or directory that jobs can name: hard links to files/

The content of a file is stored once, whatever jobs call it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from clients.runs.directory import fsync_directory
from protos.errors import Corrupt, InvalidInput, Unavailable, WrongState
from protos.rpc.failpoints import failpoint
from protos.rpc.transport import MAX_UPLOAD_FILES, MAX_UPLOAD_PATH_BYTES

NAME = ".uploads"
# How long what no job names is kept.
UNUSED_SECONDS = 24 * 3600.0
# Free space that uploads leave to the jobs and the database.
_RESERVED_BYTES = 1 << 30
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAMED = re.compile(rf"/{re.escape(NAME)}/({_SHA256.pattern})/")


@dataclass(frozen=True)
class UploadFile:
    """A file of an upload. path: relative to the directory that will hold the upload."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Missing:
    """A file that has not arrived whole. offset: its first byte that the server lacks."""

    sha256: str
    offset: int


@dataclass
class _Expected:
    """A file that a client has announced. `lock`: held by the thread that writes to it."""

    size: int
    lock: threading.Lock = field(default_factory=threading.Lock)


class Uploads:
    """Receives and keeps uploads. Methods are blocking, and safe to call from any thread."""

    def __init__(self, runs: Path) -> None:
        self._root = runs / NAME
        self._files, self._parts = self._root / "files", self._root / "parts"
        # Of the directories: links are made or garbage is removed, not both at once.
        self._lock = threading.Lock()
        self._expected: dict[str, _Expected] = {}

    def begin(self, files: Sequence[UploadFile]) -> tuple[Path | None, list[Missing]]:
        """Return the path of the upload with these files, or the files that have yet to arrive.

        The first parts of all paths are one name, that of the file or directory. Raises
        InvalidInput if the files cannot be kept, and WrongState if they do not fit on the disk.
        """
        _check(files)
        whole = self._root / _digest_of(files)
        path = whole / PurePosixPath(files[0].path).parts[0]
        with self._lock:
            for folder in (self._root, self._parts, self._files):
                folder.mkdir(exist_ok=True, mode=0o700)
            if whole.exists():
                os.utime(whole)  # garbage from now on only if no job comes
                return path, []
            lacking = {file.sha256: file.size for file in files if not self._has(file.sha256)}
            if not lacking:
                self._link(files, whole)
                return path, []
            for sha256, size in lacking.items():
                self._expected.setdefault(sha256, _Expected(size)).size = size
            offsets = {sha256: self._arrived(sha256, size) for sha256, size in lacking.items()}
        self._require_space(sum(lacking.values()) - sum(offsets.values()))
        return None, [Missing(sha256, offset) for sha256, offset in offsets.items()]

    def receive(self, sha256: str, offset: int, data: bytes) -> None:
        """Write a part of a file that `begin` has asked for, and verify the file at its last byte.

        Parts may come twice, and from several clients at once. Raises Corrupt if the file does not
        match its checksum, Unavailable if `begin` must be called again, and WrongState if the disk
        is full.
        """
        expected = self._expected.get(sha256)
        if expected is None:
            if _SHA256.fullmatch(sha256) and (self._files / sha256).exists():
                return  # another client has sent it
            raise _begin_again()
        with expected.lock, _full_disk():
            if not (self._files / sha256).exists():
                self._write(sha256, offset, data, expected.size)

    def collect(self, named: Collection[str], *, before: float) -> None:
        """Remove what no job names and nobody has begun to send since the Unix time `before`.

        `named`: the digests of uploads that jobs name.
        """
        if not self._files.is_dir():
            return
        with self._lock:
            for path in self._root.iterdir():
                unused = _SHA256.fullmatch(path.name) and path.name not in named
                if unused and path.stat().st_mtime < before:
                    shutil.rmtree(path)
            for path in [*self._files.iterdir(), *self._parts.iterdir()]:
                facts = path.stat()
                if facts.st_mtime >= before or (path.is_file() and facts.st_nlink > 1):
                    continue
                if path.is_dir():  # links of a server that was killed
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def _has(self, sha256: str) -> bool:
        """Return True if the file has arrived, and keep it for some time if nothing links to it."""
        path = self._files / sha256
        try:
            # A link keeps its time: of a model's files the time is part of what identifies them.
            if path.stat().st_nlink == 1:
                os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def _arrived(self, sha256: str, size: int) -> int:
        """Return how many bytes of a file are there."""
        try:
            return min(size, (self._parts / sha256).stat().st_size)
        except FileNotFoundError:
            return 0

    def _write(self, sha256: str, offset: int, data: bytes, size: int) -> None:
        path, end = self._parts / sha256, offset + len(data)
        if end > size:
            raise InvalidInput("more bytes than the file has", field="data")
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with open(descriptor, "r+b") as file:
            if offset > os.fstat(descriptor).st_size:
                raise _begin_again()
            file.seek(offset)
            file.write(data)
            file.flush()
            failpoint("upload-part-written")
            if end < size:
                return
            file.truncate()
            file.seek(0)
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                path.unlink()
                raise Corrupt(
                    "a file does not match its checksum",
                    hint="submit again, and do not change the files meanwhile",
                )
            os.fchmod(descriptor, 0o400)
            os.fsync(descriptor)
        failpoint("upload-verified")
        path.rename(self._files / sha256)
        self._expected.pop(sha256, None)

    def _link(self, files: Sequence[UploadFile], whole: Path) -> None:
        """Make the directory of an upload, whole or not at all."""
        made = self._parts / f"{whole.name}.{secrets.token_hex(4)}"
        try:
            for file in files:
                link = made / file.path
                link.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                link.hardlink_to(self._files / file.sha256)
        except OSError as error:
            shutil.rmtree(made, ignore_errors=True)
            raise WrongState(
                f"the server cannot link files in its --runs directory: {error.strerror}",
                hint="start it with --runs on a file system that has hard links",
            ) from error
        failpoint("upload-linked")
        fsync_directory(self._files)
        made.rename(whole)
        fsync_directory(self._root)

    def _require_space(self, needed: int) -> None:
        free = max(0, shutil.disk_usage(self._root).free - _RESERVED_BYTES)
        if needed > free:
            raise WrongState(
                f"the server lacks {needed / 1e9:.3g} GB of these files, and has room for"
                f" {free / 1e9:.3g} GB",
                hint="free disk space there, or name files that the server has",
            )


def uploads_named_in(connection: sqlite3.Connection) -> set[str]:
    """Return the digests of the uploads that jobs of the server's database name."""
    rows = connection.execute(
        "SELECT config_json FROM jobs WHERE config_json LIKE ?", (f"%/{NAME}/%",)
    )
    return {digest for (config,) in rows for digest in _NAMED.findall(config)}


def collect_now(uploads: Uploads, named: Collection[str]) -> None:
    """Remove what no job names and what was last sent or named a day ago."""
    uploads.collect(named, before=time.time() - UNUSED_SECONDS)


def _digest_of(files: Sequence[UploadFile]) -> str:
    lines = sorted(f"{file.sha256} {file.path}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _check(files: Sequence[UploadFile]) -> None:
    """Raise InvalidInput if a path or checksum cannot be that of a file of one upload."""
    if not 0 < len(files) <= MAX_UPLOAD_FILES:
        raise InvalidInput(
            f"{len(files)} files; an upload has 1 to {MAX_UPLOAD_FILES}", field="files"
        )
    paths = [PurePosixPath(file.path) for file in files]
    folders = {folder for path in paths for folder in path.parents}
    for file, path in zip(files, paths, strict=True):
        plain = (
            bool(path.parts)
            and file.path == str(path)
            and not path.is_absolute()
            and ".." not in path.parts
        )
        short = len(file.path.encode(errors="replace")) <= MAX_UPLOAD_PATH_BYTES
        if not (plain and short and file.path.isprintable()) or path in folders:
            raise InvalidInput(f"{file.path[:100]!r} cannot be the path of a file", field="files")
        if not _SHA256.fullmatch(file.sha256):
            raise InvalidInput(f"{file.path!r} has no sha256 checksum", field="files")
    if len({path.parts[0] for path in paths}) > 1 or len(set(paths)) < len(paths):
        raise InvalidInput("the files are not those of one file or directory", field="files")


def _begin_again() -> Unavailable:
    return Unavailable("the server does not wait for this part", hint="begin the upload again")


@contextmanager
def _full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise WrongState(
            f"the server's disk took no more bytes: {error.strerror}",
            hint="free disk space there, then submit again; what has arrived is kept",
        ) from error

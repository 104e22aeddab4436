"""The files that clients send for their jobs, in the directory .uploads of a server's --runs.

.uploads/files/SHA256   a complete file that matches its name
         parts/SHA256   the first bytes of an incomplete file
         DIGEST/NAME    a file or directory that jobs can name: hard links to files/

The content of a file is stored once, even if jobs use the file under several names.
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
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from clients.runs.file_system import fsync_directory
from protos.errors import Corrupt, InvalidInput, Unavailable, WrongState
from protos.rpc.failpoints import failpoint
from protos.rpc.transport import MAX_UPLOAD_FILES, MAX_UPLOAD_PATH_BYTES

NAME = ".uploads"
# Uploads that no job names are deleted after this time.
UNUSED_SECONDS = 24 * 3600.0
# Free space that uploads leave to the jobs and the database.
_RESERVED_BYTES = 1 << 30
# Disk space is kept for the incomplete files of an upload until no client has sent one of them, or
# requested the upload, for this time.
_IDLE_SECONDS = 600.0
_SHA256 = re.compile(r"[0-9a-f]{64}")
_UPLOAD_PATH = re.compile(rf"""[^\s'"(=]*/{re.escape(NAME)}/{_SHA256.pattern}/""")
_NAMED_UPLOAD = re.compile(rf"/{re.escape(NAME)}/({_SHA256.pattern})/")


@dataclass(frozen=True)
class UploadFile:
    """A file of an upload. `path` is relative to the directory that contains the upload."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class MissingPart:
    """An incomplete file. `offset` is the first byte that the server does not have."""

    sha256: str
    offset: int


@dataclass
class _Activity:
    """The time of the last activity of an upload, by `time.monotonic`.

    An activity is a request for the upload, or the arrival of a part of one of its files.
    """

    time: float


@dataclass
class _ExpectedFile:
    """A file that a client has announced. The thread that writes to it holds `lock`.

    `activities` has the activity of each unfinished upload with this file, by the upload's digest.
    """

    size: int
    activities: dict[str, _Activity] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Uploads:
    """Receives and keeps uploads. Methods are blocking, and safe to call from any thread."""

    def __init__(self, runs: Path) -> None:
        self._root = runs / NAME
        self._files, self._parts = self._root / "files", self._root / "parts"
        # Held while links are created, while space is reserved and while garbage is removed.
        self._lock = threading.Lock()
        self._expected_files: dict[str, _ExpectedFile] = {}

    def begin(self, files: Sequence[UploadFile]) -> tuple[Path | None, list[MissingPart]]:
        """Return the path of the upload with these files, or the files that are not complete.

        All paths must start with the same name, the name of the uploaded file or directory. Raises
        InvalidInput if the files cannot be stored, and WrongState if they do not fit on the disk.
        """
        _check_files(files)
        upload = self._root / _digest_of(files)
        path = upload / PurePosixPath(files[0].path).parts[0]
        with self._lock:
            for folder in (self._root, self._parts, self._files):
                folder.mkdir(exist_ok=True, mode=0o700)
            if upload.exists():
                os.utime(upload)  # cleanup deletes it after a day unless a job uses it
                return path, []
            missing_sizes = {
                file.sha256: file.size for file in files if not self._has_file(file.sha256)
            }
            if not missing_sizes:
                self._link_upload(files, upload)
                return path, []
            self._expect_files(upload.name, missing_sizes)
            offsets = {
                sha256: self._count_arrived(sha256, size) for sha256, size in missing_sizes.items()
            }
        return None, [MissingPart(sha256, offset) for sha256, offset in offsets.items()]

    def receive(self, sha256: str, offset: int, chunk: bytes) -> None:
        """Write a part of a file that `begin` has requested, and verify the file at its last byte.

        Parts may arrive twice, and from several clients at once. Raises Corrupt if the file does
        not match its checksum, Unavailable if `begin` must be called again, and WrongState if the
        disk is full.
        """
        expected_file = self._expected_files.get(sha256)
        if expected_file is None:
            if _SHA256.fullmatch(sha256) and (self._files / sha256).exists():
                return  # another client has sent it
            raise _make_begin_again()
        for activity in list(expected_file.activities.values()):
            activity.time = time.monotonic()
        with expected_file.lock, _full_disk_errors():
            if not (self._files / sha256).exists():
                self._write_part(sha256, offset, chunk, expected_file.size)

    def collect(self, named_digests: Collection[str], *, cutoff: float) -> None:
        """Remove unused uploads and files that were last requested or written before `cutoff`.

        An upload is unused if no job names it, and a file if no upload links to it.
        `named_digests` are the digests of uploads that jobs name; `cutoff` is a Unix time.
        """
        if not self._files.is_dir():
            return
        with self._lock:
            for path in self._root.iterdir():
                is_unused = _SHA256.fullmatch(path.name) and path.name not in named_digests
                if is_unused and path.stat().st_mtime < cutoff:
                    shutil.rmtree(path)
            for path in [*self._files.iterdir(), *self._parts.iterdir()]:
                file_stat = path.stat()
                if file_stat.st_mtime >= cutoff or (path.is_file() and file_stat.st_nlink > 1):
                    continue
                if path.is_dir():  # links of a server that was killed
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def _has_file(self, sha256: str) -> bool:
        """Return True if the file is complete.

        If no upload links to the file yet, its time of change is set to now, which delays its
        removal.
        """
        path = self._files / sha256
        try:
            # Do not change the time of a linked file: `key_of` identifies a model's files by their
            # times.
            if path.stat().st_nlink == 1:
                os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def _count_arrived(self, sha256: str, size: int) -> int:
        """Return the number of bytes of a file that have arrived."""
        try:
            return min(size, (self._parts / sha256).stat().st_size)
        except FileNotFoundError:
            return 0

    def _count_missing(self, sizes: Mapping[str, int]) -> int:
        """Return the number of bytes of these files that have not arrived."""
        return sum(size - self._count_arrived(sha256, size) for sha256, size in sizes.items())

    def _write_part(self, sha256: str, offset: int, chunk: bytes, size: int) -> None:
        path, end = self._parts / sha256, offset + len(chunk)
        if end > size:
            raise InvalidInput("the part has more bytes than the file", field="data")
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with open(descriptor, "r+b") as file:
            if offset > os.fstat(descriptor).st_size:
                raise _make_begin_again()
            file.seek(offset)
            file.write(chunk)
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
                    hint="submit again, and do not change the files during the upload",
                )
            os.fchmod(descriptor, 0o400)
            os.fsync(descriptor)
        failpoint("upload-verified")
        path.rename(self._files / sha256)
        self._expected_files.pop(sha256, None)

    def _link_upload(self, files: Sequence[UploadFile], upload: Path) -> None:
        """Create the directory of an upload, atomically."""
        partial_upload = self._parts / f"{upload.name}.{secrets.token_hex(4)}"
        try:
            for file in files:
                link = partial_upload / file.path
                link.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                link.hardlink_to(self._files / file.sha256)
        except OSError as error:
            shutil.rmtree(partial_upload, ignore_errors=True)
            raise WrongState(
                f"the server cannot link files in its --runs directory: {error.strerror}",
                hint="start the server with --runs on a file system that has hard links",
            ) from error
        failpoint("upload-linked")
        fsync_directory(self._files)
        partial_upload.rename(upload)
        fsync_directory(self._root)

    def _expect_files(self, upload_digest: str, sizes: Mapping[str, int]) -> None:
        """Reserve disk space for the files of an upload, and accept their parts.

        The files share one activity, because a client sends them one after the other. The caller
        holds `_lock`.

        Raises WrongState if these files and those of other uploads in progress do not fit.
        """
        cutoff = time.monotonic() - _IDLE_SECONDS
        for sha256, file in list(self._expected_files.items()):
            is_idle = all(activity.time < cutoff for activity in list(file.activities.values()))
            if is_idle and not file.lock.locked():
                self._expected_files.pop(sha256, None)
        other_sizes = {
            sha256: file.size
            for sha256, file in list(self._expected_files.items())
            if sha256 not in sizes and not self._has_file(sha256)
        }
        needed_bytes, other_bytes = self._count_missing(sizes), self._count_missing(other_sizes)
        free_bytes = max(0, shutil.disk_usage(self._root).free - _RESERVED_BYTES)
        if needed_bytes + other_bytes > free_bytes:
            others_text = f" and other uploads {other_bytes / 1e9:.3g} GB" if other_bytes else ""
            raise WrongState(
                f"these files need {needed_bytes / 1e9:.3g} GB{others_text}, but the server's disk"
                f" has {free_bytes / 1e9:.3g} GB free",
                hint="free disk space on the server, or use files that the server has",
            )
        activity = _Activity(time.monotonic())
        for sha256, size in sizes.items():
            file = self._expected_files.setdefault(sha256, _ExpectedFile(size))
            file.size = size
            file.activities[upload_digest] = activity


def named_uploads(connection: sqlite3.Connection) -> set[str]:
    """Return the digests of the uploads that jobs of the server's database name."""
    rows = connection.execute(
        "SELECT config_json FROM jobs WHERE config_json LIKE ?", (f"%/{NAME}/%",)
    )
    return {digest for (config_json,) in rows for digest in _NAMED_UPLOAD.findall(config_json)}


def name_uploads(text: str) -> str:
    """Return `text` with the names of uploaded files in place of their paths on the server."""
    return _UPLOAD_PATH.sub("", text)


def collect_garbage(uploads: Uploads, named_digests: Collection[str]) -> None:
    """Remove uploads that no job names and that were last requested more than a day ago."""
    uploads.collect(named_digests, cutoff=time.time() - UNUSED_SECONDS)


def _digest_of(files: Sequence[UploadFile]) -> str:
    lines = sorted(f"{file.sha256} {file.path}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _check_files(files: Sequence[UploadFile]) -> None:
    """Raise InvalidInput if a path or checksum is not valid, or if there is more than one root."""
    if not 0 < len(files) <= MAX_UPLOAD_FILES:
        raise InvalidInput(
            f"{len(files)} files; an upload has 1 to {MAX_UPLOAD_FILES}", field="files"
        )
    paths = [PurePosixPath(file.path) for file in files]
    folders = {folder for path in paths for folder in path.parents}
    for file, path in zip(files, paths, strict=True):
        is_plain = (
            bool(path.parts)
            and file.path == str(path)
            and not path.is_absolute()
            and ".." not in path.parts
        )
        is_short = len(file.path.encode(errors="replace")) <= MAX_UPLOAD_PATH_BYTES
        if not (is_plain and is_short and file.path.isprintable()) or path in folders:
            raise InvalidInput(f"{file.path[:100]!r} cannot be the path of a file", field="files")
        if not _SHA256.fullmatch(file.sha256):
            raise InvalidInput(f"{file.path!r} has no sha256 checksum", field="files")
    if len({path.parts[0] for path in paths}) > 1 or len(set(paths)) < len(paths):
        raise InvalidInput("the upload must be one file or one directory", field="files")


def _make_begin_again() -> Unavailable:
    return Unavailable("the server does not expect this part", hint="start the upload again")


@contextmanager
def _full_disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise WrongState(
            f"the server cannot write the file: {error.strerror}",
            hint="free disk space on the server, then submit again; the received bytes are kept",
        ) from error

"""Reads the files of a job in chunks for download."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from clients.jobs.artifacts import require_files
from clients.jobs.job import Job
from clients.runs.directory import NOTES, RunDirectory
from distill_server.jobs.run_files import RunFiles
from protos.errors import Corrupt, NotFound, Unavailable, WrongState
from protos.rpc.transport import MAX_CHUNK_BYTES


@dataclass(frozen=True)
class Piece:
    """A chunk of one file, at most MAX_CHUNK_BYTES.

    - path: path of the file, relative to the downloaded directory.
    - offset: offset of the chunk in the file, in bytes.
    - last: True for the last piece of the file.
    - sha256: digest of the complete file in the last piece; "" in other pieces.
    """

    path: str
    offset: int
    data: bytes
    last: bool
    sha256: str


async def read_pieces(
    root: Path,
    entry_names: Collection[str] = (),
    files: RunFiles | None = None,
    *,
    begin: tuple[str, int] = ("", 0),
) -> AsyncIterator[Piece]:
    """Yield the pieces of all files under `root`, sorted by name within each directory.

    - entry_names: if not empty, only these entries directly under `root` are read.
    - files: makes all reads.
    - begin: (path, offset); start with this file at this byte. The last piece of this file is sent
      even if the offset is the end of the file.

    Raises WrongState if there is a symbolic link, NotFound if a file vanishes, Corrupt if a file
    changes while it is read, Unavailable if the directory does not answer.
    """
    files = files or RunFiles()
    try:
        paths = await files.call(lambda: list(_iter_files(root, entry_names)))
    except Unavailable:
        raise
    except OSError as error:
        raise NotFound(
            "a directory was removed during the download", hint="start the download again"
        ) from error
    begin_path, offset = begin
    names = [path.relative_to(root).as_posix() for path in paths]
    if begin_path and begin_path not in names:
        raise NotFound(
            f"{begin_path[:200]} was removed during the download", hint="start the download again"
        )
    for name in names[names.index(begin_path) if begin_path else 0 :]:
        with await files.call(partial(_open_file, root / name, root, name)) as file:
            async for piece in _read_pieces(file, name, files, offset):
                yield piece
        offset = 0


def _open_file(path: Path, root: Path, relative_path: str) -> BinaryIO:
    try:
        # With O_NONBLOCK, the open does not block if a pipe has replaced the file.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise NotFound(
            f"{relative_path} was removed during the download", hint="start the download again"
        ) from error
    file = open(descriptor, "rb")  # noqa: SIM115
    # O_NOFOLLOW checks only the last component of the path: a parent directory may be a link now.
    opened_path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    if not opened_path.is_relative_to(root.resolve()):
        file.close()
        raise WrongState(
            f"{relative_path} became a symbolic link during the download; links are not followed"
        )
    return file


def notes_root(job: Job, run: RunDirectory) -> Path:
    """Return the directory that holds the notes of a job (clients.runs.directory.NOTES).

    Raises NotFound if the job has no notes yet or its files are gone.
    """
    require_files(job, run)
    if not any((run.path / name).exists() for name in NOTES):
        raise NotFound(f"job {job.id} has no notes yet", field="job_id")
    return run.path


def _iter_files(root: Path, entry_names: Collection[str] = ()) -> Iterator[Path]:
    if root.is_symlink():
        raise WrongState(f"{root.name} is a symbolic link; links are not followed")
    for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
        if entry_names and entry.name not in entry_names:
            continue
        if entry.is_symlink():
            raise WrongState(f"{entry.name} is a symbolic link; links are not followed")
        if entry.is_dir():
            yield from _iter_files(Path(entry.path))
        elif entry.is_file():
            yield Path(entry.path)


async def _read_pieces(
    file: BinaryIO, relative_path: str, files: RunFiles, begin: int = 0
) -> AsyncIterator[Piece]:
    size = (await files.call(partial(os.fstat, file.fileno()))).st_size
    digest = hashlib.sha256()
    offset = 0
    while True:
        # In a thread: reading and hashing gigabytes would block the event loop.
        chunk = await files.call(partial(_read_chunk, file, digest))
        end = offset + len(chunk)
        is_last = end >= size
        if end > size or (not chunk and end < size) or begin > size:
            raise Corrupt(
                f"{relative_path} changed while it was read", hint="start the download again"
            )
        # The bytes before `begin` are read for the checksum.
        skipped = min(max(0, begin - offset), len(chunk))
        if skipped < len(chunk) or is_last:
            sha256 = digest.hexdigest() if is_last else ""
            yield Piece(relative_path, offset + skipped, chunk[skipped:], is_last, sha256)
        if is_last:
            return
        offset = end


def _read_chunk(file: BinaryIO, digest: hashlib._Hash) -> bytes:
    chunk = file.read(MAX_CHUNK_BYTES)
    digest.update(chunk)
    return chunk

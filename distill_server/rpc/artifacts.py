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

    `path` is relative to the downloaded directory, `offset` counts bytes. `sha256` is the digest of
    the whole file in its last piece (`last`), and "" before.
    """

    path: str
    offset: int
    data: bytes
    last: bool
    sha256: str


async def pieces_of(
    root: Path, only: Collection[str] = (), files: RunFiles | None = None
) -> AsyncIterator[Piece]:
    """Yield the pieces of all files under `root`, sorted by name within each directory.

    `only`, if given, selects entries directly under `root` by name. All reads are made with
    `files`. Raises WrongState if there is a symbolic link, NotFound if a file vanishes, Corrupt if
    a file changes while it is read, Unavailable if the directory does not answer.
    """
    files = files or RunFiles()
    try:
        paths = await files.within(lambda: list(_files(root, only)))
    except Unavailable:
        raise
    except OSError as error:
        raise NotFound(
            "a directory was removed during the download", hint="start the download again"
        ) from error
    for path in paths:
        relative = path.relative_to(root).as_posix()
        with await files.within(partial(_opened, path, root, relative)) as file:
            async for piece in _pieces(file, relative, files):
                yield piece


def _opened(path: Path, root: Path, relative: str) -> BinaryIO:
    try:
        # O_NONBLOCK: a pipe may have taken the place of the file.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise NotFound(
            f"{relative} was removed during the download", hint="start the download again"
        ) from error
    file = open(descriptor, "rb")  # noqa: SIM115
    # O_NOFOLLOW checks the last component only: a directory above may have become a link.
    opened = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    if not opened.is_relative_to(root.resolve()):
        file.close()
        raise WrongState(
            f"{relative} became a symbolic link during the download; links are not followed"
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


def _files(root: Path, only: Collection[str] = ()) -> Iterator[Path]:
    if root.is_symlink():
        raise WrongState(f"{root.name} is a symbolic link; links are not followed")
    for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
        if only and entry.name not in only:
            continue
        if entry.is_symlink():
            raise WrongState(f"{entry.name} is a symbolic link; links are not followed")
        if entry.is_dir():
            yield from _files(Path(entry.path))
        elif entry.is_file():
            yield Path(entry.path)


async def _pieces(file: BinaryIO, relative: str, files: RunFiles) -> AsyncIterator[Piece]:
    size = (await files.within(partial(os.fstat, file.fileno()))).st_size
    digest = hashlib.sha256()
    offset = 0
    while True:
        # In a thread: reading and hashing gigabytes would block the event loop.
        data = await files.within(partial(_read_into, file, digest))
        end = offset + len(data)
        last = end >= size
        if end > size or (not data and end < size):
            raise Corrupt(f"{relative} changed while it was read", hint="start the download again")
        yield Piece(relative, offset, data, last, digest.hexdigest() if last else "")
        if last:
            return
        offset = end


def _read_into(file: BinaryIO, digest: hashlib._Hash) -> bytes:
    data = file.read(MAX_CHUNK_BYTES)
    digest.update(data)
    return data

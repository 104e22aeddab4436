"""Directories that appear atomically and complete, with a manifest of their files.

    manifest.json    {"files": {name: SHA-256, or a list with the SHA-256 of each part of the file}}

A directory is written in three steps: the files are written into a temporary directory, they are
synced to disk, and the temporary directory is renamed. `tensor_file.py` defines the parts of a
file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from clients.data.outside import read_document
from clients.runs.fence import own_attempt, require_unfenced
from clients.runs.file_system import fsync_directory
from protos.errors import DistillError
from protos.rpc.failpoints import failpoint
from student_trainer.checkpoints.tensor_file import hash_part

# A disk with less than this free counts as full.
_FULL_BYTES = 1 << 20
MANIFEST = "manifest.json"
# SHA-256 of a file, or of each of its parts.
Digests = str | Sequence[str]


def partial_path(path: Path) -> Path:
    """Return the path of the temporary directory in which this attempt writes the directory `path`.

    Each attempt has its own temporary directory.
    """
    return path.with_name(f".{path.name}.{own_attempt()}.tmp")


def begin(path: Path) -> Path:
    """Create an empty temporary directory for `path`, and return its path.

    Deletes the temporary directories of earlier attempts. Raises WrongState if a newer attempt has
    taken over the run.
    """
    require_unfenced()
    partial = partial_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}.*tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    failpoint("checkpoint-begun")
    return partial


def publish(path: Path, digests: Mapping[str, Digests]) -> None:
    """Write the manifest of the temporary directory of `path`, and rename the directory to `path`.

    `digests`: the digests by the relative path of each file. The files must already be synced to
    disk. A directory that exists at `path` is replaced. Raises WrongState if a newer attempt has
    taken over the run.
    """
    partial = partial_path(path)
    failpoint("checkpoint-filled")
    manifest = {"files": dict(sorted(digests.items()))}
    write_synced(partial / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    failpoint("checkpoint-listed")
    for directory in (partial, *(entry for entry in partial.rglob("*") if entry.is_dir())):
        fsync_directory(directory)
    failpoint("checkpoint-sealed")
    require_unfenced()
    if path.exists():  # left by an earlier attempt that resumed from another step
        delete(path)
        failpoint("checkpoint-replaced")
    partial.rename(path)
    failpoint("checkpoint-renamed")
    fsync_directory(path.parent)


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Write the directory `path` atomically.

    `write` gets an empty temporary directory, and writes the files into it. This function then adds
    the manifest, syncs every file to disk, and renames the temporary directory to `path`. A
    directory that exists at `path` is replaced. Raises WrongState, before `write` and again before
    the rename, if a newer attempt has taken over the run.
    """
    try:
        partial = begin(path)
        write(partial)
        digests = {}
        for file in (entry for entry in partial.rglob("*") if entry.is_file()):
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
            digests[str(file.relative_to(partial))] = _hash_file(file)
        publish(path, digests)
    except BaseException as error:  # most likely the disk is full, so free the space
        disk_error = as_disk_error(error, path)
        shutil.rmtree(partial_path(path), ignore_errors=True)
        if disk_error is None or disk_error is error:
            raise
        raise disk_error from error


def as_disk_error(error: BaseException, path: Path) -> OSError | None:
    """Convert the error of a failed write to `path` into an OSError with errno and file.

    Returns None if `error` has another cause. Errors of safetensors contain the errno only in their
    message.
    """
    number = 0
    if isinstance(error, OSError):
        if error.filename is not None:
            return error
        number = error.errno or errno.EIO
    elif isinstance(error, DistillError) or not isinstance(error, Exception):
        return None
    elif match := re.search(r"\(os error (\d+)\)", str(error)):
        number = int(match[1])
    else:
        with contextlib.suppress(OSError):
            if shutil.disk_usage(path.parent).free < _FULL_BYTES:
                number = errno.ENOSPC
    return OSError(number, os.strerror(number), str(path)) if number else None


def write_synced(path: Path, data: bytes) -> str:
    """Write a file, sync it to disk, and return its SHA-256.

    Creates the file's directory if it does not exist.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def read_manifest(path: Path) -> Mapping[str, Digests]:
    """Return the digests of the files of a directory, from its manifest, by relative path.

    Raises OSError if the manifest cannot be read. Raises ValueError if the manifest is damaged, or
    if it names a file outside the directory.
    """
    manifest = read_document(path / MANIFEST)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict):
        raise ValueError(f"{path / MANIFEST} lists no files")
    for name, digests in files.items():
        parts = PurePosixPath(name).parts
        if name != "/".join(parts) or not parts or {"..", "/", MANIFEST} & {*parts} or "\0" in name:
            raise ValueError(f"{path / MANIFEST} names a file outside its directory: {name!r}")
        listed = [digests] if isinstance(digests, str) else digests
        if not isinstance(listed, list) or not listed:
            raise ValueError(f"{path / MANIFEST} has no digest of {name!r}")
    return files


def is_intact(path: Path, part: int = 0, parts: int = 1) -> bool:
    """Return whether every file of the manifest exists and has the SHA-256 that the manifest lists.

    Several processes can divide the work: process `part` of `parts` checks only every `parts`-th
    digest, beginning with digest number `part`.
    """
    try:
        digest_entries = [
            (path / name, number, len(part_digests), digest)
            for name, file_digests in read_manifest(path).items()
            for part_digests in [[file_digests] if isinstance(file_digests, str) else file_digests]
            for number, digest in enumerate(part_digests)
        ]
        return all(
            (hash_part(file, number, part_digests) if part_digests > 1 else _hash_file(file))
            == digest
            for file, number, part_digests, digest in digest_entries[part::parts]
        )
    except (OSError, ValueError):
        return False


def delete(path: Path) -> None:
    """Delete a directory: rename it to a temporary name, then remove its files.

    On a network file system, the removal fails while another process has one of the files open.
    `delete_old` in `checkpoint.py` then removes the renamed directory later.
    """
    trash_path = path.with_name(f".{path.name}.{time.time_ns()}.tmp")
    path.rename(trash_path)
    shutil.rmtree(trash_path, ignore_errors=True)


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

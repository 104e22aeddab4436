"""Directories that are published complete or not at all, with a manifest of their files.

    manifest.json    {"files": {name: SHA-256, or one for each part of a file of several parts}}

The files are written into a temporary directory and synced to disk, which is then renamed. The
parts of a file are those of `tensor_file.py`.
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
from pathlib import Path

from clients.runs.directory import fsync_directory
from clients.runs.fence import own_attempt, require_unfenced
from protos.errors import DistillError
from protos.rpc.failpoints import failpoint
from student_trainer.checkpoints.tensor_file import digest_of_part

# A disk with less than this free counts as full.
_FULL_BYTES = 1 << 20
_MANIFEST = "manifest.json"
# SHA-256 of a file, or of each of its parts.
Digests = str | Sequence[str]


def partial_of(path: Path) -> Path:
    """Return the temporary directory of `path`, which an earlier attempt does not write to."""
    return path.with_name(f".{path.name}.{own_attempt()}.tmp")


def begin(path: Path) -> Path:
    """Create the temporary directory of `path`, empty, and return it.

    Deletes those that earlier attempts have left. Raises WrongState if a newer attempt has taken
    over the run.
    """
    require_unfenced()
    partial = partial_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}.*tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    failpoint("checkpoint-begun")
    return partial


def publish(path: Path, digests: Mapping[str, Digests]) -> None:
    """Give the temporary directory of `path` a manifest and its name. Its files are synced already.

    A directory that exists at `path` is replaced. Raises WrongState if a newer attempt has taken
    over the run.
    """
    partial = partial_of(path)
    failpoint("checkpoint-filled")
    manifest = {"files": dict(sorted(digests.items()))}
    write_synced(partial / _MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    failpoint("checkpoint-listed")
    for directory in (partial, *(one for one in partial.rglob("*") if one.is_dir())):
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
    """Write a directory atomically: `write` fills a temporary one, which is renamed to `path`.

    Adds the manifest, syncs every file to disk, and replaces a directory that exists at `path`.
    Raises WrongState if a newer attempt has taken over the run, before writing or before the
    rename.
    """
    try:
        partial = begin(path)
        write(partial)
        digests = {}
        for file in (one for one in partial.rglob("*") if one.is_file()):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
            digests[str(file.relative_to(partial))] = _sha256(file)
        publish(path, digests)
    except BaseException as error:  # most likely the disk is full, so free the space
        found = of_disk(error, path)
        shutil.rmtree(partial_of(path), ignore_errors=True)
        if found is None or found is error:
            raise
        raise found from error


def of_disk(error: BaseException, path: Path) -> OSError | None:
    """Return a failed write to `path` as an OSError with number and file; None for other errors.

    safetensors writes the number into its message.
    """
    number = 0
    if isinstance(error, OSError):
        if error.filename is not None:
            return error
        number = error.errno or errno.EIO
    elif isinstance(error, DistillError) or not isinstance(error, Exception):
        return None
    elif found := re.search(r"\(os error (\d+)\)", str(error)):
        number = int(found[1])
    else:
        with contextlib.suppress(OSError):
            if shutil.disk_usage(path.parent).free < _FULL_BYTES:
                number = errno.ENOSPC
    return OSError(number, os.strerror(number), str(path)) if number else None


def write_synced(path: Path, data: bytes) -> str:
    """Write a file, sync it to disk, and return its SHA-256. Creates the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def is_intact(path: Path, part: int = 0, parts: int = 1) -> bool:
    """Return whether the files of the manifest exist and have the SHA-256 listed there.

    Only every `parts`-th digest is checked, from number `part`: each of several processes reads a
    share of the directory.
    """
    try:
        files: dict[str, Digests] = json.loads((path / _MANIFEST).read_text())["files"]
        listed = [
            (path / name, number, len(of), digest)
            for name, found in files.items()
            for of in [[found] if isinstance(found, str) else found]
            for number, digest in enumerate(of)
        ]
        return all(
            (digest_of_part(file, number, of) if of > 1 else _sha256(file)) == digest
            for file, number, of, digest in listed[part::parts]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def delete(path: Path) -> None:
    """Delete a directory: rename it to a temporary name, then remove what can be removed.

    On a network file system a file that some process still has open leaves its directory behind.
    `delete_old` of `checkpoint.py` tries again.
    """
    aside = path.with_name(f".{path.name}.{time.time_ns()}.tmp")
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

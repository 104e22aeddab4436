"""A small disk: a tmpfs of a given size; needs root."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def mount(place: Path, size: str) -> None:
    """Mount a tmpfs on a directory. Raises OSError with the reason if that is not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise OSError(process.stderr.strip())


def unmount(place: Path) -> None:
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def why_not() -> str:
    """Return the reason why no disk can be mounted here, or an empty string."""
    with tempfile.TemporaryDirectory() as place:
        try:
            mount(Path(place), "64k")
        except OSError as error:
            return str(error)
        unmount(Path(place))
    return ""


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A new directory with a disk of this size; skips the test if none can be mounted."""
    place.mkdir()
    try:
        mount(place, size)
    except OSError as error:
        pytest.skip(f"no tmpfs: {error}")
    yield place
    unmount(place)

"""The checkpoints of a run with their sizes. Blocking: call it in a thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from clients.runs.directory import RunDirectory

# Limits for one answer. A checkpoint has a few files for each rank.
_MAX_CHECKPOINTS, _MAX_FILES = 100, 10_000


def checkpoints_of(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the newest 100 checkpoints as JSON records, newest first.

    Each has its `step`, `bytes` (the total size of its files) and `saved_at` (Unix seconds). A
    checkpoint that is removed meanwhile is not included.
    """
    records = []
    for step in run.checkpoint_steps()[: -_MAX_CHECKPOINTS - 1 : -1]:
        path = run.checkpoint(step)
        with suppress(OSError):
            saved_at = path.stat().st_mtime
            records.append({"step": step, "bytes": sum(_iter_sizes(path)), "saved_at": saved_at})
    return records


def _iter_sizes(path: Path) -> Iterator[int]:
    """Yield the sizes of the first 10,000 files below `path`; links are not followed."""
    file_count = 0
    for folder, _, names in os.walk(path):
        for name in names:
            if (file_count := file_count + 1) > _MAX_FILES:
                return
            yield os.lstat(os.path.join(folder, name)).st_size

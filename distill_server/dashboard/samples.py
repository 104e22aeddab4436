"""Reads the transcripts of a run: `samples/step-000050.jsonl`, one JSON object per line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from clients.runs.directory import RunDirectory
from protos.errors import NotFound

# Limits for one file. `distill pull` downloads the whole file.
_MAX_BYTES, _MAX_SAMPLES = 512 << 10, 50
_NAME = re.compile(r"step-(\d+)\.jsonl")


def sample_steps(run: RunDirectory) -> list[int]:
    """Return the steps that have transcripts, newest first."""
    try:
        names = os.listdir(run.samples)
    except OSError:
        return []
    return sorted(
        (int(match[1]) for name in names if (match := _NAME.fullmatch(name))), reverse=True
    )


def samples_of(run: RunDirectory, step: int) -> list[dict[str, Any]]:
    """Return up to 50 transcripts of a step, from the first 512 KiB of its file.

    Lines that are not JSON objects are skipped. Raises NotFound if the step has no file.
    """
    records: list[dict[str, Any]] = []
    for line in _read_start(run.samples / f"step-{step:06d}.jsonl").splitlines()[:_MAX_SAMPLES]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue  # cut by the size limit, or written by a trainer that was killed
        if isinstance(record, dict):
            records.append(record)
    return records


def _read_start(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise NotFound(f"no transcripts in {path.name}", field="step") from error
    with open(descriptor, "rb") as file:
        return file.read(_MAX_BYTES)

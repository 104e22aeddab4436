"""Transcripts that a trainer left: `samples/step-000050.jsonl`, one object a line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from clients.runs.directory import RunDirectory
from protos.errors import NotFound

# Of one file: the rest is for `distill pull` and an editor.
_MOST_BYTES, _MOST_SAMPLES = 512 << 10, 50
_NAME = re.compile(r"step-(\d+)\.jsonl")


def sample_steps(run: RunDirectory) -> list[int]:
    """The steps that have transcripts, the newest first."""
    try:
        names = os.listdir(run.samples)
    except OSError:
        return []
    return sorted((int(found[1]) for n in names if (found := _NAME.fullmatch(n))), reverse=True)


def samples_of(run: RunDirectory, step: int) -> list[dict[str, Any]]:
    """The first transcripts of a step. Raises NotFound."""
    records: list[dict[str, Any]] = []
    for line in _read(run.samples / f"step-{step:06d}.jsonl").splitlines()[:_MOST_SAMPLES]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue  # cut off by the limit, or by a killed trainer
        if isinstance(record, dict):
            records.append(record)
    return records


def _read(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise NotFound(f"no transcripts in {path.name}", field="step") from error
    with open(descriptor, "rb") as file:
        return file.read(_MOST_BYTES)

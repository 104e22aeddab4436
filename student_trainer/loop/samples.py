"""Writes the held-out answers of an evaluation into the run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from clients.runs.directory import RunDirectory, replace_file
from clients.runs.fence import require_unfenced


def write_samples(run: RunDirectory, step: int, transcripts: Sequence[Mapping[str, Any]]) -> None:
    """Write the transcripts of an evaluation to samples/step-N.jsonl, one JSON object per line.

    Raises WrongState if a newer attempt has taken over the run.
    """
    run.samples.mkdir(exist_ok=True)
    require_unfenced()
    text = "".join(json.dumps(transcript) + "\n" for transcript in transcripts)
    replace_file(run.samples / f"step-{step:06d}.jsonl", text)

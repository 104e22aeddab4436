"""A file of results to which a benchmark adds each run, so that it can resume."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import torch

RESULTS = Path("benchmarks/results")
_write_lock = Lock()


def describe_machine() -> str:
    """Return processor, number of cores and version of torch."""
    return f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"


def load_results(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored {settings, "runs"}, without runs of other settings."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    same_settings = {name: stored.get(name) for name in settings} == dict(settings)
    return {**settings, "runs": stored["runs"] if same_settings else []}


def add_run(path: Path, result: dict[str, Any], run: dict[str, Any]) -> None:
    """Add a run to the results and write them. Thread-safe."""
    with _write_lock:
        result["runs"].append(run)
        partial = path.with_suffix(".part")
        partial.write_text(format_json(result))
        partial.rename(path)


def format_json(result: Mapping[str, Any]) -> str:
    """Return the results as JSON with a line for each element of a list."""
    fields = []
    for name, value in result.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n" + ",\n".join(f"  {json.dumps(element)}" for element in value) + "\n ]"
        fields.append(f' "{name}": {text}')
    return "{\n" + ",\n".join(fields) + "\n}\n"

"""What a model directory may hold: data. transformers would also run code, or open pickles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protos.errors import InvalidInput

WEIGHTS_INDEX = "model.safetensors.index.json"


def refuse_code(path: Path, field: str) -> None:
    """Raises InvalidInput, naming `field`, for a model that brings code or pickled weights.

    transformers opens what the index of the weights names, of whatever format, even where it was
    told to use safetensors only.
    """
    if "auto_map" in _read(path / "config.json", field):
        raise InvalidInput(
            f"{path} brings its own Python code (auto_map), which is never run",
            field=field,
            hint="use a model whose architecture transformers knows",
        )
    shards = _read(path / WEIGHTS_INDEX, field).get("weight_map", {})
    names = shards.values() if isinstance(shards, dict) else [shards]
    for name in names:
        if not isinstance(name, str) or "/" in name or not name.endswith(".safetensors"):
            raise InvalidInput(
                f"{path / WEIGHTS_INDEX} names {name!r}; only .safetensors beside it are opened",
                field=field,
                hint="convert the model with save_pretrained()",
            )


def _read(file: Path, field: str) -> dict[str, Any]:
    """The JSON object in a file; {} where there is none."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{file} is not JSON", field=field, hint="restore it") from error
    if not isinstance(found, dict):
        raise InvalidInput(f"{file} is not a JSON object", field=field, hint="restore it")
    return found

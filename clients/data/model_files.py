"""Refuses model directories with code or pickled weights, which transformers would load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protos.errors import InvalidInput

WEIGHTS_INDEX = "model.safetensors.index.json"
# Keys of a job that name a model directory, and the suffixes of its files that programs read. Other
# files, such as pickles, are not copied.
MODEL_KEYS = frozenset({"student.model", "teacher.model", "teacher.tokenizer", "data.tokenizer"})
MODEL_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja")


def refuse_code(path: Path, field: str) -> None:
    """Raise InvalidInput, naming `field`, if a model directory has code or pickled weights.

    The index of the weights is checked because transformers opens every file that it names, in any
    format, even with `use_safetensors=True`.
    """
    if "auto_map" in _read_json(path / "config.json", field):
        raise InvalidInput(
            f"{path} has its own Python code (auto_map), which is never run",
            field=field,
            hint="use a model whose architecture is part of transformers",
        )
    shards = _read_json(path / WEIGHTS_INDEX, field).get("weight_map", {})
    names = shards.values() if isinstance(shards, dict) else [shards]
    for name in names:
        if not isinstance(name, str) or "/" in name or not name.endswith(".safetensors"):
            raise InvalidInput(
                f"{path / WEIGHTS_INDEX} names {name!r}, which is not a .safetensors file in the"
                " same directory",
                field=field,
                hint="load the model and save it again with save_pretrained()",
            )


def _read_json(file: Path, field: str) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file does not exist."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{file} is not JSON", field=field, hint="restore the file") from error
    if not isinstance(content, dict):
        raise InvalidInput(f"{file} is not a JSON object", field=field, hint="restore the file")
    return content

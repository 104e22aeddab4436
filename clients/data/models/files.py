"""The files of a model directory: which of them programs read, and the contents of their headers.

`field` is the key or option that errors name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clients.data.outside import read_document
from clients.data.tokens.tokenizer import TEMPLATES
from protos.errors import InvalidInput

log = logging.getLogger(__name__)

WEIGHTS_INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
# Keys of a job that name a model directory, and the suffixes of its files that programs read. Other
# files, such as pickles, are not copied.
MODEL_KEYS = frozenset({"student.model", "teacher.model", "teacher.tokenizer", "data.tokenizer"})
MODEL_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja")

# Directories inside a model directory whose files programs read, too; the second has the anchor of
# an export.
_MODEL_FOLDERS = (TEMPLATES, "anchor")


def is_model_file(name: str) -> bool:
    """Return whether programs read the file `name` (a relative path) of a model directory."""
    *folders, file = name.split("/")
    known = all(folder in _MODEL_FOLDERS for folder in folders)
    return known and file.endswith(MODEL_SUFFIXES) and not file.startswith(".")


def list_model_files(directory: Path) -> list[str]:
    """Return the sorted relative paths of the files of a model directory that programs read.

    Export, upload and checkpoint use this list.
    """
    names = (path.relative_to(directory).as_posix() for path in directory.rglob("*"))
    return sorted(name for name in names if is_model_file(name) and (directory / name).is_file())


def shard_names(path: Path, field: str) -> frozenset[str]:
    """Return the files named in the weight index of a directory; empty without an index.

    Raises InvalidInput, naming `field`, if a name is not that of a .safetensors file in the
    directory.
    """
    shards = read_object(path / WEIGHTS_INDEX, field).get("weight_map", {})
    names = list(shards.values()) if isinstance(shards, dict) else [shards]
    for name in names:
        if not isinstance(name, str) or "/" in name or not name.endswith(".safetensors"):
            raise InvalidInput(
                f"{path / WEIGHTS_INDEX} names {name!r}, which is not a .safetensors file in the"
                " same directory",
                field=field,
                hint="load the model and save it again with save_pretrained()",
            )
    return frozenset(names)


def list_weight_files(path: Path, field: str) -> list[Path]:
    """Return the .safetensors files that transformers would load, sorted by name.

    The list is empty if the directory has no such files. Raises InvalidInput if the index of
    weights is malformed.
    """
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    return [path / name for name in sorted(shard_names(path, field))]


def read_dtypes(file: Path) -> dict[str, str]:
    """Return the dtype of each tensor of a .safetensors file, such as BF16, by its name.

    Empty if the header of the file is not readable.
    """
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > file.stat().st_size:
            return {}
        try:
            header = json.loads(stream.read(size))
        except (ValueError, RecursionError):
            return {}
    if not isinstance(header, dict):
        return {}
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {
        name: str(entry.get("dtype") if isinstance(entry, dict) else None)
        for name, entry in entries.items()
    }


def quantisation_of(path: Path, field: str) -> Mapping[str, Any] | None:
    """Return the entry `quantization_config` of the model at `path`, or None.

    The entry of a vision-language model may be in its `text_config`. Raises InvalidInput, naming
    `field`, if config.json is not a JSON object.
    """
    config = read_object(path / "config.json", field)
    text_config = config.get("text_config")
    entry = config.get("quantization_config")
    if entry is None and isinstance(text_config, dict):
        entry = text_config.get("quantization_config")
    return entry if isinstance(entry, dict) else None


def read_object(file: Path, field: str) -> dict[str, Any]:
    """Return the JSON object in a file of a model directory; {} if the file does not exist.

    Raises InvalidInput, naming `field`, if the file cannot be read or contains no object.
    """
    try:
        content = read_document(file)
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        problem = "is not JSON" if isinstance(error, ValueError) else f"cannot be read: {error}"
        raise InvalidInput(f"{file} {problem}", field=field, hint="restore the file") from error
    if not isinstance(content, dict):
        raise InvalidInput(f"{file} is not a JSON object", field=field, hint="restore the file")
    return content

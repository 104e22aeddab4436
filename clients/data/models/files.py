"""Refuses model directories that would load incorrectly or execute code.

Teacher, student, engines and evaluations share these checks. `field` is the key named in errors.
"""

from __future__ import annotations

import json
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from clients.data.outside import read_document
from protos.errors import InvalidInput

log = logging.getLogger(__name__)

WEIGHTS_INDEX = "model.safetensors.index.json"
# Entries of config.json.
_LAYER_COUNTS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers"}
ADAPTER_CONFIG = "adapter_config.json"
# Keys of a job that name a model directory, and the suffixes of its files that programs read. Other
# files, such as pickles, are not copied.
MODEL_KEYS = frozenset({"student.model", "teacher.model", "teacher.tokenizer", "data.tokenizer"})
MODEL_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja")

# Directories inside a model directory whose files programs read, too: chat templates beside the
# default one, and the anchor of an export.
TEMPLATES = "additional_chat_templates"
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


def refuse_code(path: Path, field: str) -> None:
    """Raise InvalidInput, naming `field`, if a model directory has code or pickled weights.

    The weight index is also checked, because transformers opens every file in the index, in any
    format, even with `use_safetensors=True`.
    """
    if "auto_map" in read_object(path / "config.json", field):
        raise InvalidInput(
            f"{path} has its own Python code (auto_map), which is never run",
            field=field,
            hint="use a model whose architecture is part of transformers",
        )
    shard_names(path, field)


def shard_names(path: Path, field: str) -> frozenset[str]:
    """Return the files named in the weight index of a directory; none without an index.

    Raises InvalidInput, naming `field`, if a file is not a .safetensors file in the directory.
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


def refuse_adapter(path: Path, field: str) -> None:
    """Raise InvalidInput if a model directory contains an adapter.

    transformers would load the adapter, and its base model from another place.
    """
    if not (path / ADAPTER_CONFIG).is_file():
        return
    if (path / "config.json").is_file():
        raise InvalidInput(
            f"{path} has an adapter beside its weights",
            field=field,
            hint="merge the adapter into the weights, or remove adapter_config.json",
        )
    base = read_object(path / ADAPTER_CONFIG, field).get("base_model_name_or_path")
    raise InvalidInput(
        f"{path} is an adapter of {base or 'another model'}, not a model",
        field=field,
        hint="merge the adapter into its base model (merge_and_unload of peft), and give the"
        " merged model",
    )


def refuse_quantised(path: Path, field: str) -> None:
    """Raise InvalidInput if the weights of a model directory are quantised: not trainable."""
    if (entry := quantisation_of(path, field)) is not None:
        refuse_quantisation(str(path), entry, field)


def quantisation_of(path: Path, field: str) -> Mapping[str, Any] | None:
    """Return the entry `quantization_config` of the model at `path`, or None.

    The entry of a vision-language model may be in its `text_config`. Raises InvalidInput, naming
    `field`, if config.json is no JSON object.
    """
    config = read_object(path / "config.json", field)
    text_config = config.get("text_config")
    entry = config.get("quantization_config")
    if entry is None and isinstance(text_config, dict):
        entry = text_config.get("quantization_config")
    return entry if isinstance(entry, dict) else None


def refuse_quantisation(model: str, entry: Any, field: str) -> None:
    """Raise InvalidInput for the quantised weights of `model`.

    `entry`: the `quantization_config` of the model.
    """
    method = entry.get("quant_method", "unknown method") if isinstance(entry, dict) else entry
    raise InvalidInput(
        f"the weights of {model} are quantised ({method}), and quantised weights cannot be trained",
        field=field,
        hint="give the model in bfloat16 or float32",
    )


def refuse_missing_files(path: Path, field: str) -> None:
    """Raise InvalidInput if a directory lacks a file of its weight index, or nearly all layers."""
    weights = path / "model.safetensors"
    if weights.is_file():
        _refuse_missing_layers(path, _count_tensors(weights), field)
        return
    missing = sorted(name for name in shard_names(path, field) if not (path / name).is_file())
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise InvalidInput(
            f"{path} lacks {missing[0]}{others}, which {WEIGHTS_INDEX} names",
            field=field,
            hint="copy the whole directory again",
        )
    _refuse_missing_layers(
        path, len(read_object(path / WEIGHTS_INDEX, field).get("weight_map", ())), field
    )


def _refuse_missing_layers(path: Path, tensors: int, field: str) -> None:
    """Raise InvalidInput if config.json has far more layers than the files have tensors.

    transformers would make all layers before it looks for their weights. A model may use a tensor
    in several layers. `tensors`: 0 if the files are not readable, which is reported later.
    """
    config = read_object(path / "config.json", field)
    text_config = config.get("text_config")
    for part in (config, text_config if isinstance(text_config, dict) else {}):
        for key in part.keys() & _LAYER_COUNTS:
            if isinstance(part[key], int) and part[key] > 100 * tensors > 0:
                raise InvalidInput(
                    f"{path / 'config.json'} has {key} = {part[key]}, but the model's files have"
                    f" {tensors} tensors",
                    field=field,
                    hint="save the whole model again, with the config.json it belongs to",
                )


def _count_tensors(file: Path) -> int:
    """Return the number of tensors in a .safetensors file; 0 if its header is not readable."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > file.stat().st_size:
            return 0
        try:
            header = json.loads(stream.read(size))
        except ValueError:
            return 0
    return len(header.keys() - {"__metadata__"}) if isinstance(header, dict) else 0


def check_loaded_weights(
    model: str, missing: Collection[str], unused: Collection[str], field: str
) -> None:
    """Raise InvalidInput if the files lack a weight of the model; log weights that are not used.

    `missing`: weights that are in no file, which transformers would initialise randomly. `unused`:
    names in the files that the model does not have, for example the last layers if config.json
    specifies too few layers.
    """
    if not missing:
        if unused:
            log.warning(
                "%s has %d tensors that its architecture does not use, such as %s; check its"
                " config.json if it should use them",
                *(model, len(unused), min(unused)),
            )
        return
    name, hint = min(missing), "save the whole model again, with its config.json"
    for other in sorted(unused):
        if unwrapped := _unwrapped_name(other, missing):
            name = unwrapped
            hint = f"its files have {other!r} instead: save the model itself, not its wrapper"
            break
    others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
    raise InvalidInput(f"{model} has no weights for {name}{others}", field=field, hint=hint)


def refuse_unscaled(
    model: str, files: Sequence[Path], unused: Collection[str], field: str, *, is_quantised: bool
) -> None:
    """Raise InvalidInput if scaled weights of a model would be loaded without their scales.

    transformers ignores the scales if config.json does not declare the quantisation method, or
    declares an unknown method. `files`: the .safetensors files of the model. `unused`: tensors in
    the files that the loaded model does not have. `is_quantised`: config.json declares a method.
    """
    dtypes: dict[str, str] = {}
    for file in files:
        dtypes |= _read_dtypes(file)
    for name in sorted(unused):
        layer, _, last = name.rpartition(".")
        weight = f"{layer}.weight"
        if last != "bias" and weight in dtypes and weight not in unused:
            raise InvalidInput(
                f"transformers does not use {name} of {model}: its weights are quantised in a way"
                " that transformers does not know, or that config.json does not declare",
                field=field,
                hint="give an unquantised checkpoint, or one that transformers supports",
            )
    for name, dtype in dtypes.items():
        if dtype.startswith("F8") and not is_quantised:
            raise InvalidInput(
                f"{name} of {model} is {dtype}, and config.json declares no quantisation, so its"
                " scale is unknown",
                field=field,
                hint="give an unquantised checkpoint",
            )


def _read_dtypes(file: Path) -> dict[str, str]:
    """Return the dtype of each tensor in a .safetensors file, such as BF16, by its name."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return {name: entry["dtype"] for name, entry in header.items() if name != "__metadata__"}


def _unwrapped_name(wrapped: str, names: Collection[str]) -> str | None:
    """Return the name in `names` that torch.compile, DDP or peft saved as `wrapped`.

    They add a prefix, or insert `base_layer` before the last part.
    """
    parts = wrapped.replace(".base_layer.", ".").split(".")
    return next((name for n in range(len(parts)) if (name := ".".join(parts[n:])) in names), None)


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


_SECONDS = 3.0


def use_caches_if_away() -> None:
    """Set HF_HUB_OFFLINE=1 if the hub is unreachable, so that its libraries use their caches.

    Otherwise the libraries would retry for most of a minute per file. Call this function before
    importing these libraries, which read the variable at import. Waits for the hub for up to 3 s.
    """
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(request, timeout=_SECONDS).close()
    except urllib.error.HTTPError as answer:
        answer.close()  # any HTTP reply shows that the hub can be reached
    except OSError as error:
        log.warning("%s cannot be reached, using the local cache only: %s", endpoint, error)
        os.environ["HF_HUB_OFFLINE"] = "1"

"""The files of a Hugging Face model directory: how weights are split, and the other files."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from clients.data.tokens.answers import end_ids
from student_trainer.model.lora import has_adapters, save_adapter_configuration

# Limit of a file of weights; transformers' default for `save_pretrained`.
_MAX_FILE_BYTES = 50_000_000_000


def remove_aliases(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights that a model directory stores: tied ones under their first name only.

    `weights`: the parameters and buffers of the model, or replacements for them, by name.
    """
    first: dict[int, str] = {}
    for name, weight in weights.items():
        if name not in (model._keys_to_ignore_on_save or ()):
            first.setdefault(id(weight), name)
    return {name: weights[name] for name in first.values()}


def split_weights(
    weights: Mapping[str, Tensor], parameters: int
) -> tuple[dict[str, dict[str, Tensor]], dict[str, bytes]]:
    """Return the weights by file, and the text of the index by its name if there are several files.

    `parameters`: the number of parameters, for the index. Files and names are those of
    transformers' `save_pretrained`. Only shapes and dtypes are read.
    """
    sizes = {
        name: torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        for name, weight in weights.items()
    }
    split = split_torch_state_dict_into_shards(
        sizes, filename_pattern="model{suffix}.safetensors", max_shard_size=_MAX_FILE_BYTES
    )
    files = {
        file: {name: weights[name] for name in names}
        for file, names in split.filename_to_tensors.items()
    }
    if not split.is_sharded:
        return files, {}
    index = {
        "metadata": {
            "total_parameters": parameters,
            **split.metadata,
        },
        "weight_map": split.tensor_to_filename,
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    return files, {"model.safetensors.index.json": text.encode()}


def collect_small_files(model: Any, tokenizer: Any) -> dict[str, bytes]:
    """Return the files of a model directory that hold no weights, by name.

    They do not change during a run.
    """
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        if has_adapters(model):
            save_adapter_configuration(path, model)
        else:
            save_configuration(path, model, model.dtype, tokenizer)
        tokenizer.save_pretrained(path)
        return {
            str(file.relative_to(path)): file.read_bytes()
            for file in sorted(path.rglob("*"))
            if file.is_file()
        }


def save_configuration(path: Path, model: Any, dtype: torch.dtype, tokenizer: Any) -> None:
    """Write the files config.json and generation_config.json, as `save_pretrained` does.

    `dtype`: of the stored weights. generation_config.json names all tokens that end an answer, so
    that a server of the model stops where training did. The configuration of the model itself does
    not change.
    """
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(path)
    if model.can_generate():
        generation_config = copy.deepcopy(model.generation_config)
        ends = end_ids(model.generation_config, tokenizer)
        if ends:
            generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
        generation_config.save_pretrained(path)
    if hasattr(model, "image_processor"):  # see model/loading.py
        model.image_processor.save_pretrained(path)

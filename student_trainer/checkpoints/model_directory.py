"""The files of a Hugging Face model directory: the split of the weights, and all other files."""

from __future__ import annotations

import copy
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from clients.data.models.files import ADAPTER_CONFIG, TEMPLATES, list_model_files
from clients.data.tokens.answers import end_ids
from clients.data.tokens.tokenizer import LEGACY_TEMPLATE, chat_templates_in
from student_trainer.checkpoints.atomic_directory import MANIFEST
from student_trainer.checkpoints.compatible_files import (
    make_configuration_compatible,
    make_tokenizer_compatible,
)
from student_trainer.model.lora import has_adapters, save_adapter_configuration

log = logging.getLogger(__name__)

# Limit of a file of weights; transformers' default for `save_pretrained`.
_MAX_FILE_BYTES = 50_000_000_000


def remove_aliases(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights that a model directory stores. Tied weights are stored under their first
    name.

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


def collect_small_files(model: Any, tokenizer: Any, source: Path | None) -> dict[str, bytes]:
    """Return the files of a model directory without weights, by name.

    These files do not change during a run. `source`: see `write_small_files`.
    """
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        write_small_files(path, model, model.dtype, tokenizer, source)
        if has_adapters(model):
            (path / "config.json").unlink()
            (path / "generation_config.json").unlink(missing_ok=True)
            save_adapter_configuration(path, model)
        return {
            str(file.relative_to(path)): file.read_bytes()
            for file in sorted(path.rglob("*"))
            if file.is_file()
        }


def write_small_files(
    path: Path, model: Any, dtype: torch.dtype, tokenizer: Any, source: Path | None
) -> None:
    """Write the files of a model directory without weights, for transformers 4 and 5.

    `source`: the directory of the original model, whose other files, such as tokenizer files, are
    copied. None: the model was created in memory. A directory that no longer exists is treated as
    None. `dtype`: of the stored weights.
    """
    if source is not None and not source.is_dir():
        log.warning(
            "%s has been deleted: the files of the tokenizer are those of transformers", source
        )
        source = None
    if source is None:
        tokenizer.save_pretrained(path)
        if hasattr(model, "image_processor"):  # see model/loading.py
            model.image_processor.save_pretrained(path)
    else:
        for name in list_model_files(source):
            if _is_carried_over(name):
                (path / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source / name, path / name)
        _write_chat_template(path, tokenizer.chat_template)
    make_tokenizer_compatible(path / "tokenizer_config.json")
    _save_configuration(path, model, dtype, tokenizer, source)


def _write_chat_template(path: Path, template: Any) -> None:
    """Write a chat template in place of those in `path`, unless they are the same."""
    if not isinstance(template, str) or chat_templates_in(path) == {"default": template}:
        return
    shutil.rmtree(path / TEMPLATES, ignore_errors=True)
    (path / LEGACY_TEMPLATE).unlink(missing_ok=True)
    (path / "chat_template.jinja").write_text(template, "utf-8")


def _is_carried_over(name: str) -> bool:
    """Return whether a file of a model directory has no weights and is copied unchanged."""
    # The manifest of an earlier export is about the files of that export.
    is_rewritten = name in ("config.json", "generation_config.json", ADAPTER_CONFIG, MANIFEST)
    is_about_weights = name.endswith((".safetensors", ".index.json"))
    return not is_rewritten and not is_about_weights and not name.startswith("anchor/")


def _save_configuration(
    path: Path, model: Any, dtype: torch.dtype, tokenizer: Any, source: Path | None
) -> None:
    """Write the files config.json and generation_config.json; see `write_small_files`.

    generation_config.json lists all end tokens of answers, so that an inference server stops as
    sampling in training does. The configuration of the model object does not change.
    """
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(path)
    make_configuration_compatible(
        path / "config.json",
        source / "config.json" if source is not None else None,
        str(dtype).removeprefix("torch."),
        config.get_text_config().attribute_map,
        is_tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
    )
    if model.can_generate():
        generation_config = copy.deepcopy(model.generation_config)
        ends = end_ids(model.generation_config, tokenizer)
        if ends:
            generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
        generation_config.save_pretrained(path)

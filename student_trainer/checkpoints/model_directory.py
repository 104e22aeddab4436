"""The files of a Hugging Face model directory.

`split_weights` divides the weights into files. The other functions read, write and compare the
files without weights: configuration, tokenizer and chat template.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from clients.data.models.files import ADAPTER_CONFIG, list_model_files
from clients.data.tokens.answers import end_ids
from clients.data.tokens.tokenizer import LEGACY_TEMPLATE, TEMPLATES, chat_templates_in
from protos.errors import WrongState
from student_trainer.checkpoints.atomic_directory import MANIFEST
from student_trainer.checkpoints.compatible_files import (
    make_configuration_compatible,
    make_tokenizer_compatible,
)
from student_trainer.checkpoints.next_token_layers import NextTokenLayers
from student_trainer.model.lora import has_adapters, save_adapter_configuration

_TOKENIZER_FILES = frozenset(
    ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja")
)
# Limit of a file of weights; transformers' default for `save_pretrained`.
_MAX_FILE_BYTES = 50_000_000_000


def remove_aliases(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights that a model directory stores.

    A tied weight is stored only under its first name. `weights`: the parameters and buffers of the
    model, or other tensors to store in their place, by name.
    """
    first: dict[int, str] = {}
    for name, weight in weights.items():
        if name not in (model._keys_to_ignore_on_save or ()):
            first.setdefault(id(weight), name)
    return {name: weights[name] for name in first.values()}


def split_weights(
    weights: Mapping[str, Tensor], parameters: int
) -> tuple[dict[str, dict[str, Tensor]], dict[str, bytes]]:
    """Divide weights into files. Return the weights of each file, and the text of the index file.

    The index is returned by its name; without an index, as for a single file, this mapping is
    empty. The files and names are the same as those of `save_pretrained` of transformers.
    `parameters`: the number of parameters, which the index contains. Only shapes and dtypes of the
    weights are read.
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


def read_source_files(source: Path, chat_template: Any) -> dict[str, bytes]:
    """Return the files without weights that the run copies from the student's directory, by name.

    These files are the tokenizer, config.json, and further files without weights. `chat_template`
    replaces the chat template, unless it is None. A run reads the files once, at its start, so
    later changes of the directory do not reach the export.
    """
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        for file in list_model_files(source):
            if _is_carried_over(file):
                (path / file).parent.mkdir(exist_ok=True)
                shutil.copyfile(source / file, path / file)
        _write_chat_template(path, chat_template)
        return _read_files(path)


def check_same_tokenizer(path: Path, source_files: Mapping[str, bytes]) -> None:
    """Raise WrongState if the student's tokenizer or chat template has changed since a checkpoint.

    `path`: the model directory of the checkpoint. `source_files`: the result of
    `read_source_files`.
    """
    for name in _TOKENIZER_FILES & source_files.keys():
        file = path / name
        if file.is_file() and file.read_bytes() != source_files[name]:
            raise WrongState(
                f"{name} differs from the file that this run started with",
                field="student.model",
                hint="restore the original file, or submit a new job",
            )


def collect_small_files(
    model: Any, tokenizer: Any, source_files: Mapping[str, bytes] | None
) -> dict[str, bytes]:
    """Return the files without weights of the model directory of a checkpoint, by name.

    These files are the same for all checkpoints of a run. `source_files`: see `write_small_files`.
    """
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        write_small_files(path, model, model.dtype, tokenizer, source_files)
        if has_adapters(model):
            (path / "config.json").unlink()
            (path / "generation_config.json").unlink(missing_ok=True)
            save_adapter_configuration(path, model)
        else:
            # Layers that transformers does not read are in exports only.
            names = [name for name, _ in model.named_parameters()]
            make_next_token_layers(None, path, model, names).correct_count()
        return _read_files(path)


def _read_files(path: Path) -> dict[str, bytes]:
    files = (file for file in sorted(path.rglob("*")) if file.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def write_small_files(
    path: Path,
    model: Any,
    dtype: torch.dtype,
    tokenizer: Any,
    source_files: Mapping[str, bytes] | None,
) -> None:
    """Write the files without weights of a model directory, readable with transformers 4 and 5.

    `source_files`: the files of the original model, as `read_source_files` returned them; None if
    the model was created in memory. `dtype`: the dtype of the stored weights.
    """
    if source_files is None:
        tokenizer.save_pretrained(path)
        if hasattr(model, "image_processor"):  # see model/loading.py
            model.image_processor.save_pretrained(path)
    for name, content in (source_files or {}).items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
    make_tokenizer_compatible(path / "tokenizer_config.json")
    _save_configuration(path, model, dtype, tokenizer, (source_files or {}).get("config.json"))


def make_next_token_layers(
    source: Path | None, path: Path, model: Any, own_names: Collection[str]
) -> NextTokenLayers:
    """Return the next-token layers for the model directory `path`, which already has its
    config.json.

    See `NextTokenLayers` for the other arguments.
    """
    # Blt has several stacks.
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", sys.maxsize)
    return NextTokenLayers(source, path / "config.json", layers, own_names)


def _write_chat_template(path: Path, template: Any) -> None:
    """Replace the chat templates in `path` by `template`.

    Does nothing if `path` already has exactly this template, or if `template` is not a text.
    """
    if not isinstance(template, str) or chat_templates_in(path) == {"default": template}:
        return
    shutil.rmtree(path / TEMPLATES, ignore_errors=True)
    (path / LEGACY_TEMPLATE).unlink(missing_ok=True)
    (path / "chat_template.jinja").write_text(template, "utf-8")


def _is_carried_over(name: str) -> bool:
    """Return whether the model directories of a run get a copy of the student's file `name`."""
    # The manifest of an earlier export is about the files of that export.
    is_rewritten = name in ("generation_config.json", ADAPTER_CONFIG, MANIFEST)
    is_about_weights = name.endswith((".safetensors", ".index.json"))
    return not is_rewritten and not is_about_weights and not name.startswith("anchor/")


def _save_configuration(
    path: Path, model: Any, dtype: torch.dtype, tokenizer: Any, original: bytes | None
) -> None:
    """Write config.json and generation_config.json; see `write_small_files`.

    `original`: config.json of the original model. generation_config.json lists all tokens that end
    an answer, so that an inference server stops at the same tokens as the sampling of the training.
    The configuration of `model` does not change.
    """
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(path)
    make_configuration_compatible(
        path / "config.json",
        original,
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

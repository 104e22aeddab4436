"""Finds and checks the files of a model before any of them is used, and fingerprints them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clients.data.hub import find_on_hub, hub_error, is_hub_id
from clients.data.models.check import Reader, check_model
from clients.data.models.files import list_weight_files, read_object
from protos.errors import InvalidInput
from teacher_service.models.digests import FileDigests

log = logging.getLogger(__name__)

_HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
# A new number changes all fingerprints, so that rows of an earlier scheme are never reused.
_SCHEME = 2
# Entries of config.json, at any depth, that cannot change a logit of a forward pass:
_IRRELEVANT_CONFIG = frozenset(
    {
        # notes of the program that saved the model; the fingerprint has the dtype in use separately
        *("_name_or_path", "transformers_version", "dtype", "torch_dtype"),
        # generation and its cache: a teacher only scores
        *("use_cache", "cache_implementation", "bos_token_id", "eos_token_id"),
        *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"),
        *("do_sample", "max_length", "max_new_tokens", "min_length", "num_beams", "temperature"),
        *("top_k", "top_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
        # training: initial values, dropout, auxiliary losses
        *("initializer_range", "initializer_factor", "attention_dropout", "hidden_dropout"),
        *("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "activation_dropout"),
        *("router_aux_loss_coef", "router_z_loss_coef", "gradient_checkpointing"),
        # further outputs, and labels of classifiers
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params"),
    }
)


def model_directory(model: str, engine: Reader) -> Path:
    """Return the local directory of `model`, a path or hub id; download a hub id if needed.

    Raises InvalidInput with field --model if there is no such model, or if `engine` cannot use it;
    see `check_model`, whose notes are logged. Raises Unavailable if the hub does not answer and its
    cache lacks the model.
    """
    path = Path(model).expanduser()
    if is_hub_id(model):
        path = _download(model)
    if not path.exists():
        raise _model_error(
            f"there is no directory {model}", "give a Hugging Face directory or a hub id"
        )
    for note in check_model(path, "--model", engine):
        log.warning(note)
    return path


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        is_online = find_on_hub(hub_id)
        path = snapshot_download(hub_id, allow_patterns=_HUB_FILES, local_files_only=not is_online)
    except Exception as error:  # errors of the network have many classes
        hint = "check the spelling and the connection, or give a local directory"
        raise hub_error(error, str(error), field="--model", hint=hint) from error
    return Path(path)


def weight_files(path: Path) -> list[Path]:
    """Return the .safetensors files that from_pretrained() would load, sorted by name.

    Empty if the directory has none. Raises InvalidInput if the index of weights is malformed.
    """
    return list_weight_files(path, "--model")


def file_facts(path: Path, digests: FileDigests) -> dict[str, object]:
    """Return the part of the fingerprint that the files of the model determine.

    `digests` has the digests of the weights; this function waits for them. The result has the
    sha256 of each weight file, and the config without entries that cannot change a logit. Files of
    the tokenizer are excluded, because a teacher gets token ids; the engines add the vocabulary.
    Raises InvalidInput if a file is malformed.
    """
    config = _strip_irrelevant(read_object(path / "config.json", "--model"))
    return {"scheme": _SCHEME, "files": digests.by_name(), "config": config}


def release_of(version: str) -> str:
    """Return the first two numbers of a library's version, without patch and build numbers."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def _strip_irrelevant(config: Any) -> Any:
    """Return a copy of `config` without the entries that cannot change a logit, at any depth."""
    if isinstance(config, list):
        return [_strip_irrelevant(entry) for entry in config]
    if not isinstance(config, dict):
        return config
    return {key: _strip_irrelevant(config[key]) for key in config if key not in _IRRELEVANT_CONFIG}


def _model_error(message: str, hint: str) -> InvalidInput:
    return InvalidInput(message, field="--model", hint=hint)


def block_of(quantisation: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (rows, columns) of the blocks of a weight that have one scale each.

    Returns None if the quantisation has no such block.
    """
    groups = quantisation.get("config_groups") or {}
    schemes = [group.get("weights") or {} for group in groups.values()]
    block_sizes = [quantisation.get("weight_block_size")]
    block_sizes += [scheme.get("block_structure") for scheme in schemes]
    blocks = {(int(block[0]), int(block[1])) for block in block_sizes if block and len(block) == 2}
    return blocks.pop() if len(blocks) == 1 else None

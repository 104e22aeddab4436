"""Adapters (LoRA, arXiv 2106.09685) of a teacher, checked before the model is loaded.

The rows of a request with an adapter equal the rows of the model with the adapter merged into its
weights. Adapters of head and embeddings are not supported, because the engines have one head.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from clients.data.models.files import read_object
from protos.errors import InvalidInput

OPTION = "--adapter"
WEIGHTS = "adapter_model.safetensors"
_CONFIGURATION = "adapter_config.json"
_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,99}")
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")
_NOT_HIDDEN = ("lm_head", "embed_out", "embed_tokens", "wte", "embed_in")
# Entries of adapter_config.json that, with the tensors, determine what is added to the weights.
_SCALING = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
# Entries that make an adapter differ from W + (alpha / rank) B A.
_OTHER_KINDS = (
    *("use_dora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save"),
    *("alora_invocation_tokens", "layer_replication", "target_parameters"),
    *("trainable_token_indices", "megatron_config"),
)
# Values of init_lora_weights; others make peft change the weights of the model at loading.
_PLAIN_INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Adapter:
    """An adapter in peft's format, in the directory `path`.

    `rank` is the largest rank of a layer. `layers` are the last parts of the layers' names, such as
    q_proj. `digest` changes with everything that changes rows.
    """

    name: str
    path: Path
    rank: int
    layers: frozenset[str]
    digest: str


def read_adapters(options: Sequence[str]) -> tuple[Adapter, ...]:
    """Return the adapters of `options`, each NAME=DIR.

    Raises InvalidInput (--adapter) for a repeated name, for a directory without an adapter in
    peft's format, and for an adapter that changes anything except linear layers between embeddings
    and head.
    """
    adapters = tuple(_read_adapter(option) for option in options)
    names = [adapter.name for adapter in adapters]
    for name in names:
        if names.count(name) > 1:
            raise _adapter_error(
                f"two adapters are named {name!r}", "give each adapter its own name"
            )
    return adapters


def _read_adapter(option: str) -> Adapter:
    name, equals, directory = option.partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise _adapter_error(
            f"{option!r} is not NAME=DIR", "give a name of letters, digits, - and _"
        )
    path = Path(directory).expanduser()
    for file in (_CONFIGURATION, WEIGHTS):
        if not (path / file).is_file():
            raise _adapter_error(f"{path} has no {file}", "give a directory that peft has saved")
    config = read_object(path / _CONFIGURATION, OPTION)
    try:
        _require_plain(path, config)
        rank = _find_max_rank(config)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _adapter_error(
            f"{path}/{_CONFIGURATION} is malformed: {error}", "restore the file"
        ) from error
    layers = _read_hidden_layers(path)
    facts = json.dumps([config.get(key) for key in _SCALING], sort_keys=True).encode()
    digest = hashlib.sha256(facts)
    digest.update((path / WEIGHTS).read_bytes())
    return Adapter(name, path, rank, layers, digest.hexdigest())


def _find_max_rank(config: dict[str, Any]) -> int:
    ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
    return max(int(rank) for rank in ranks)


def _require_plain(path: Path, config: dict[str, Any]) -> None:
    adapter_type = config.get("peft_type")
    if adapter_type != "LORA":
        raise _adapter_error(
            f"{path} is an adapter of type {adapter_type}, not LORA",
            "merge the adapter into the model",
        )
    bias = config.get("bias", "none")
    unsupported_keys = [key for key in _OTHER_KINDS if config.get(key)]
    unsupported_keys += [] if bias == "none" else ["bias"]
    unsupported_keys += (
        []
        if config.get("init_lora_weights", True) in _PLAIN_INITIALISATIONS
        else ["init_lora_weights"]
    )
    if unsupported_keys:
        raise _adapter_error(
            f"the adapter {path} has {unsupported_keys[0]} = {config[unsupported_keys[0]]!r}",
            "give a plain LoRA adapter, or merge the adapter and serve the merged model",
        )


def _read_hidden_layers(path: Path) -> frozenset[str]:
    try:
        with safe_open(path / WEIGHTS, framework="pt") as tensors:
            names = sorted(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise _adapter_error(
            f"{path}/{WEIGHTS} cannot be read: {error}", "restore the file"
        ) from error
    layers = set()
    for name in names:
        match = _TENSOR.fullmatch(name)
        layer = match[1].rpartition(".")[2] if match else ""
        if not layer or layer in _NOT_HIDDEN:
            raise _adapter_error(
                f"the adapter {path} has {name}, which is not a product for a layer between"
                f" embeddings and head",
                "train the adapter without embeddings and head, or merge the adapter and serve"
                " the merged model",
            )
        layers.add(layer)
    if not layers:
        raise _adapter_error(
            f"{path}/{WEIGHTS} has no tensors", "give a directory that peft has saved"
        )
    return frozenset(layers)


def _adapter_error(message: str, hint: str) -> InvalidInput:
    return InvalidInput(message, field=OPTION, hint=hint)

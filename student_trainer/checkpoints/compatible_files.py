"""Makes the JSON files of a model directory readable with transformers 4 and 5, and with programs
that are built on one of them.

Version 5 of transformers renamed keys. It writes `rope_parameters`; version 4 reads `rope_theta`
and `rope_scaling`, and uses default values if they are missing. Version 5 also writes names of
tokenizer classes that version 4 does not have. A model directory therefore contains copies of the
files of the original model, and both names of each key.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

# The keys of rope_parameters that transformers 4 reads outside of rope_scaling.
_TOP_LEVEL_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")
# Names in config.json, by model type, where they differ from rope_theta and partial_rotary_factor.
_NEOX_NAMES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
_ROPE_NAMES = {"gpt_neox": _NEOX_NAMES, "gpt_neox_japanese": _NEOX_NAMES}


def make_configuration_compatible(
    file: Path, original: bytes | None, dtype: str, aliases: Mapping[str, str], *, is_tied: bool
) -> None:
    """Rewrite a config.json of transformers 5 so that transformers 4 reads the same model.

    - original: config.json of the model before training. If its model type is the same, its entries
      are kept, so that programs for the original model can read the result.
    - dtype: the dtype of the stored weights.
    - aliases: other names of keys that version 4 may read, for example num_experts for
      num_local_experts.
    - is_tied: whether the head shares the weights of the input embeddings.
    """
    saved = json.loads(file.read_text("utf-8"))
    config = saved
    if original is not None:
        original_config = json.loads(original)
        if original_config.get("model_type") == saved["model_type"]:
            config = {**original_config, "architectures": saved["architectures"]}
    text, saved_text = config.get("text_config", config), saved.get("text_config", saved)
    for part in (config, text):
        part["tie_word_embeddings"] = is_tied
    _set_dtype(config, dtype)
    for alias, name in aliases.items():
        if name in text:
            text.setdefault(alias, text[name])
    rope_parameters = saved_text.get("rope_parameters")
    if rope_parameters:
        text.setdefault("rope_parameters", rope_parameters)
        model_type = text.get("model_type", "")
        names = _ROPE_NAMES.get(model_type, {})
        old_keys = {
            names.get(key, key): value
            for key, value in _old_rope_keys(rope_parameters, model_type).items()
            if text.get(names.get(key, key)) is None
        }
        if _keeps_rope(text, old_keys):
            text |= old_keys
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def make_tokenizer_compatible(file: Path) -> None:
    """Rewrite a tokenizer_config.json of transformers 5 so that transformers 4 reads it too."""
    if not file.is_file():
        return
    config = json.loads(file.read_text("utf-8"))
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if (file.parent / "chat_template.jinja").is_file():
        config.pop("chat_template", None)  # some programs prefer this entry
    tokens = config.get("extra_special_tokens")
    if isinstance(tokens, list):  # transformers 4 reads a table by name
        del config["extra_special_tokens"]
        config.setdefault("additional_special_tokens", tokens)
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Set the keys `dtype` and `torch_dtype` of a configuration.

    Also set them in each nested configuration that has one of these keys.
    """
    for value in config.values():
        if isinstance(value, dict) and value.keys() & {"dtype", "torch_dtype"}:
            _set_dtype(value, dtype)
    config["dtype"] = config["torch_dtype"] = dtype


def _keeps_rope(text: Mapping[str, Any], old_keys: Mapping[str, Any]) -> bool:
    """Return whether transformers 5 still reads the same rotary embedding if `old_keys` are added.

    `old_keys`: the keys of version 4. Some model types that are new in version 5 refuse these keys.
    Returns True for a model type that transformers does not have, because the code of this type may
    read the keys.
    """
    if text.get("model_type") not in CONFIG_MAPPING:
        return True
    config_class = CONFIG_MAPPING[text["model_type"]]
    # Only from_json_file decodes infinite numbers; no rotary embedding has one.
    finite = {key: value for key, value in text.items() if "__float__" not in repr(value)}
    expected = config_class.from_dict(copy.deepcopy(finite)).rope_parameters
    try:
        config = config_class.from_dict(copy.deepcopy(finite | dict(old_keys)))
    except (KeyError, ValueError, TypeError, AttributeError):
        return False
    # `type` is the name that version 4 has for rope_type; version 5 keeps both.
    parameters = {key: value for key, value in config.rope_parameters.items() if key != "type"}
    return bool(parameters == expected)


def _old_rope_keys(rope_parameters: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Convert `rope_parameters` of transformers 5 into the keys of transformers 4.

    `rope_parameters` contains the parameters, or a table with the parameters of each layer type.
    """
    by_layer_type = {key: part for key, part in rope_parameters.items() if isinstance(part, dict)}
    if not by_layer_type:
        keys = {key: rope_parameters[key] for key in _TOP_LEVEL_ROPE_KEYS if key in rope_parameters}
        scaling = {
            key: value for key, value in rope_parameters.items() if key not in _TOP_LEVEL_ROPE_KEYS
        }
        if scaling.keys() - {"rope_type", "type"} or scaling.get("rope_type") != "default":
            if model_type == "phi3":  # transformers 4 accepts only these three entries
                factors = {key: scaling[key] for key in ("short_factor", "long_factor")}
                scaling = {"type": scaling["rope_type"], **factors}
            keys["rope_scaling"] = scaling
        return keys
    keys = _old_rope_keys(by_layer_type.get("full_attention", {}), model_type)
    if "sliding_attention" in by_layer_type:
        keys["rope_local_base_freq"] = by_layer_type["sliding_attention"]["rope_theta"]
    return keys

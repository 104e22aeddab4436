"""Low-rank adapters (LoRA, arXiv 2106.09685): add, save, load and merge them.

A layer's weight W is frozen, and the layer computes with W + (alpha / rank) B A. B starts at zero,
so that training starts from the plain model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from clients.config.common import StudentConfig
from protos.errors import InvalidInput

_FILE = "adapter_model.safetensors"
_ADAPTER = "default"


def add_adapters(model: Any, student: StudentConfig) -> None:
    """Freeze the model and add an adapter to every linear layer except the head, in place.

    The model keeps its class, its decoder, its head and its `generate`. Adapters are float32. With
    `student.lora.train_head` the head is trained too, in full. Raises InvalidInput (`student.lora`)
    for a mixture of experts stacked in one parameter, since `merged` could not merge such adapters.
    """
    # These imports take half a second; only jobs with adapters need them.
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import ParamWrapper

    assert student.lora is not None
    settings = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=student.model,
        revision=student.revision,
        target_modules="all-linear",
        r=student.lora.rank,
        lora_alpha=student.lora.alpha or 2 * student.lora.rank,
    )
    inject_adapter_in_model(settings, model)
    if any(isinstance(module, ParamWrapper) for module in model.modules()):
        raise InvalidInput(
            "adapters do not work with a mixture of experts",
            field="student.lora",
            hint="remove the table to train all weights, or choose a dense student",
        )
    if student.lora.train_head:
        head = model.get_output_embeddings().requires_grad_(True)
        settings.modules_to_save = [
            name
            for name, module in model.named_modules()
            if getattr(module, "weight", None) is head.weight
        ]
        settings.ensure_weight_tying = len(settings.modules_to_save) > 1
    for parameter in learned(model).values():  # peft gives them the frozen dtype
        parameter.data = parameter.data.float()


def has_adapters(model: Any) -> bool:
    """Return True if `add_adapters` has changed the model."""
    return hasattr(model, "peft_config")


def learned(model: nn.Module) -> dict[str, Tensor]:
    """Return the trainable weights by name; a tied weight is there under each of its names."""
    return {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }


def save_adapters(path: Path, model: Any, weights: Mapping[str, Tensor]) -> None:
    """Write the adapters to the directory `path`, in the format of `peft`.

    `weights`: the trainable weights by name, unsharded. Creates the directory.
    """
    path.mkdir(parents=True, exist_ok=True)
    model.peft_config[_ADAPTER].save_pretrained(path)
    save_file({_key(name): value.cpu().clone() for name, value in weights.items()}, path / _FILE)


def load_adapters(path: Path, model: nn.Module) -> None:
    """Load the weights that `save_adapters` wrote to `path`, in place.

    Raises InvalidInput (`student.lora`) if their names or shapes are not those of the model.
    """
    saved = load_file(path / _FILE) if (path / _FILE).is_file() else {}
    ours = {_key(name): parameter for name, parameter in learned(model).items()}
    if {key: p.shape for key, p in ours.items()} != {key: v.shape for key, v in saved.items()}:
        raise InvalidInput(
            "the checkpoint has other adapters than the job asks for",
            field="student.lora",
            hint="restore the table that the run started with, or submit a new job",
        )
    with torch.no_grad():
        for key, parameter in ours.items():
            parameter.copy_(saved[key])


def merged(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the plain model: each adapter is added to the weight of its layer.

    `weights`: all weights, unsharded, by their names in `model`; two names may share a tensor. The
    result is on the CPU, in float32.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils import transpose

    wide = {id(weight): _wide(weight) for weight in weights.values()}
    plain = {
        name.replace(".base_layer.", "."): wide[id(weight)]
        for name, weight in weights.items()
        if ".lora_" not in name
    }
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            names = (f"{name}.lora_{part}.{_ADAPTER}.weight" for part in "AB")
            down, up = (wide[id(weights[key])] for key in names)
            update = transpose(up @ down, layer.fan_in_fan_out) * layer.scaling[_ADAPTER]
            plain[f"{name}.weight"] = plain[f"{name}.weight"] + update
    return plain


def _wide(weight: Tensor) -> Tensor:
    return weight.cpu().float() if weight.is_floating_point() else weight.cpu()


def _key(name: str) -> str:
    return "base_model.model." + name.replace(f".{_ADAPTER}.", ".")

"""Low-rank adapters (LoRA): what learns, how it is kept, and the plain model that comes of it.

A layer's weight W stays as it is, and W + (alpha / rank) B A is used; B begins at zero.
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
    """Freeze the model and put an adapter on every linear layer but the head.

    In place: the model stays of its own class, with its decoder, its head and its `generate`.
    Raises InvalidInput for experts stacked in one parameter: `merged` could not undo those.
    """
    # Half a second of imports, for jobs with adapters only.
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
            "adapters cannot be put on a mixture of experts",
            field="student.lora",
            hint="leave the table out to train all weights, or give a dense student",
        )
    if student.lora.train_head:
        head = model.get_output_embeddings().requires_grad_(True)
        settings.modules_to_save = [
            name
            for name, module in model.named_modules()
            if getattr(module, "weight", None) is head.weight
        ]
        settings.ensure_weight_tying = len(settings.modules_to_save) > 1
    for parameter in learned(model).values():  # they are made like the frozen ones
        parameter.data = parameter.data.float()


def has_adapters(model: Any) -> bool:
    return hasattr(model, "peft_config")


def learned(model: nn.Module) -> dict[str, Tensor]:
    """The weights that learn: tied ones under each of their names."""
    return {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }


def save_adapters(path: Path, model: Any, weights: Mapping[str, Tensor]) -> None:
    """Write what `peft` reads. `weights`: those that learn, whole."""
    path.mkdir(parents=True, exist_ok=True)
    model.peft_config[_ADAPTER].save_pretrained(path)
    save_file({_key(name): value.cpu().clone() for name, value in weights.items()}, path / _FILE)


def load_adapters(path: Path, model: nn.Module) -> None:
    """Take the weights back; raises InvalidInput if they are not those of `student.lora`."""
    saved = load_file(path / _FILE) if (path / _FILE).is_file() else {}
    ours = {_key(name): parameter for name, parameter in learned(model).items()}
    if {key: p.shape for key, p in ours.items()} != {key: v.shape for key, v in saved.items()}:
        raise InvalidInput(
            "the checkpoint was made with other adapters than the job asks for",
            field="student.lora",
            hint="resume with the table that the run began with, or submit the job anew",
        )
    with torch.no_grad():
        for key, parameter in ours.items():
            parameter.copy_(saved[key])


def merged(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The plain model's weights in float32 on the CPU: every adapter added to the layer under it.

    `weights`: all of them, whole, by the names of `model`; one tensor may have two names.
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

"""Adapters of a transformers model; at most one is active at a time."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import load_file

from protos.errors import InvalidInput
from protos.extras import require_extra
from teacher_service.models.adapters import OPTION, WEIGHTS, Adapter

_PREFIX = "base_model.model."


class HfAdapters:
    """The adapters of a served model, added to its layers in place; none is active at first.

    Their weights are float32, whatever the dtype of the model.
    """

    def __init__(self, model: Any, adapters: Sequence[Adapter]) -> None:
        """Raise InvalidInput if peft is not installed, or an adapter is not one of this model."""
        self._layers: list[Any] = []
        if not adapters:
            return
        require_extra("train", "an adapter", field=OPTION, only=["peft"])
        # This import takes half a second; only teachers with adapters need it.
        from peft.tuners.lora import LoraLayer

        for adapter in adapters:
            _add_adapter(model, adapter)
        self._layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        model.eval()  # the new layers have dropout
        self.use("")

    def use(self, name: str) -> None:
        """Make the adapter with this name the active one; "": none."""
        for layer in self._layers:
            layer.enable_adapters(bool(name))
            if name:
                layer.set_adapter(_adapter_key(name), inference_mode=True)


def _adapter_key(name: str) -> str:
    # Not the name itself: peft stores adapters in a ModuleDict, which rejects names like "keys".
    return f"adapter_{name}"


@torch.no_grad()
def _add_adapter(model: Any, adapter: Adapter) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    key = _adapter_key(adapter.name)
    config = LoraConfig.from_pretrained(str(adapter.path))
    config.inference_mode = True
    config.init_lora_weights = True  # overwritten by the loaded values
    stored_tensors = load_file(adapter.path / WEIGHTS)
    try:
        with warnings.catch_warnings(action="ignore"):  # it warns of several adapters
            inject_adapter_in_model(config, model, key)
    except ValueError as error:  # the model has none of the layers
        raise _mismatch_error(adapter, str(error)) from error
    parameters = {
        _PREFIX + name.replace(f".{key}.", "."): parameter
        for name, parameter in model.named_parameters()
        if f".{key}." in name
    }
    for name in sorted(parameters.keys() ^ stored_tensors.keys()):
        raise _mismatch_error(adapter, f"only one of them has {name}")
    for name, parameter in parameters.items():
        if parameter.shape != stored_tensors[name].shape:
            raise _mismatch_error(adapter, f"{name} has another shape")
        parameter.data = stored_tensors[name].to(parameter.device, torch.float32)


def _mismatch_error(adapter: Adapter, reason: str) -> InvalidInput:
    return InvalidInput(
        f"the adapter {adapter.path} is not one of this model: {' '.join(reason.split())[:200]}",
        field=OPTION,
        hint="give the model that it was trained on as --model",
    )

"""The weights of a torch model that is being served: updates in place, and adapters."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from protos.errors import InvalidInput, WrongState
from protos.extras import require_extra
from teacher_service.engines.base import TensorSpec, WeightUpdate
from teacher_service.models.adapters import OPTION, WEIGHTS, Adapter

_PREFIX = "base_model.model."


class ModelWeights:
    """The parameters of a served model, updated in place.

    Updating in place also updates every view of a parameter, such as a tied head.

    An EMA of a model that is served in half precision needs float32 master weights, because its
    steps are smaller than the spacing of bfloat16 numbers. The first EMA update creates them. They
    cost 4 bytes per parameter.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        # named_parameters() lists a tied weight once, under its first name.
        self._parameters = dict(model.named_parameters())
        self._masters: dict[str, Tensor] = {}
        self._intact = True

    def specs(self) -> Mapping[str, TensorSpec]:
        """Return the shape and the served dtype of each parameter by name."""
        return {
            name: TensorSpec(tuple(p.shape), str(p.dtype).removeprefix("torch."))
            for name, p in self._parameters.items()
        }

    def require_intact(self) -> None:
        """Raise WrongState if the last update failed partway and left a mix of old and new weights.

        Updates are validated before they are applied, so only a device error can cause this.
        """
        if not self._intact:
            raise WrongState(
                "a weight update failed partway, so the weights match no version",
                hint="push a full replacement, or restart the teacher",
            )

    @torch.no_grad()
    def apply(self, update: WeightUpdate) -> None:
        """Apply a validated update.

        If the update fails partway, `require_intact` raises until a full replacement succeeds.
        Raises WrongState for an EMA update of weights that are not intact.
        """
        if update.tau is not None:
            self.require_intact()
        self._intact = False
        for name, parameter in self._parameters.items():
            spec, data = update.tensors[name]
            pushed_tensor = torch.from_numpy(data).view(getattr(torch, spec.dtype)).view(spec.shape)
            pushed_tensor = pushed_tensor.to(parameter.device)
            if update.tau is not None:
                pushed_tensor = self._update_average(name, parameter, pushed_tensor, update.tau)
            elif name in self._masters:
                self._masters[name].copy_(pushed_tensor)
            parameter.copy_(pushed_tensor)
        self._intact = True

    def _update_average(self, name: str, parameter: Tensor, theta: Tensor, tau: float) -> Tensor:
        phi = parameter.data
        if phi.dtype is not torch.float32:
            if name not in self._masters:
                self._masters[name] = phi.float()
            phi = self._masters[name]
        return phi.mul_(tau).add_(theta.float(), alpha=1 - tau)


class HfAdapters:
    """The adapters of a served model, added to its layers in place; none is active at first.

    Their weights are float32, whatever the dtype of the model.
    """

    def __init__(self, model: Any, adapters: Sequence[Adapter]) -> None:
        """Raise InvalidInput if peft is not installed, or an adapter does not fit this model."""
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
        """Activate the adapter with this name; "" deactivates all adapters."""
        for layer in self._layers:
            layer.enable_adapters(bool(name))
            if name:
                layer.set_adapter(_adapter_key(name), inference_mode=True)


def _adapter_key(name: str) -> str:
    # The key has a prefix: peft stores adapters in a ModuleDict, which rejects names like "keys".
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
        with warnings.catch_warnings(action="ignore"):  # peft warns of several adapters
            inject_adapter_in_model(config, model, key)
    except ValueError as error:  # the model has none of the layers
        raise _mismatch_error(adapter, str(error)) from error
    parameters = {
        _PREFIX + name.replace(f".{key}.", "."): parameter
        for name, parameter in model.named_parameters()
        if f".{key}." in name
    }
    for name in sorted(parameters.keys() ^ stored_tensors.keys()):
        raise _mismatch_error(adapter, f"only the adapter or the model has {name}")
    for name, parameter in parameters.items():
        if parameter.shape != stored_tensors[name].shape:
            raise _mismatch_error(adapter, f"{name} has another shape")
        parameter.data = stored_tensors[name].to(parameter.device, torch.float32)


def _mismatch_error(adapter: Adapter, reason: str) -> InvalidInput:
    return InvalidInput(
        f"the adapter {adapter.path} does not fit this model: {' '.join(reason.split())[:200]}",
        field=OPTION,
        hint="set --model to the base model of the adapter",
    )

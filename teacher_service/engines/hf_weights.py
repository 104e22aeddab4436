"""In-place weight updates (replace or EMA) of a torch model that is being served."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from protos.errors import WrongState
from teacher_service.engines.base import TensorSpec, WeightUpdate


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

        If it fails partway, `require_intact` raises until a full replacement succeeds. Raises
        WrongState for an EMA update of weights that are not intact.
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

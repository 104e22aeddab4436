"""The parameters of a torch model while a client pushes new ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from protos.errors import WrongState
from teacher_service.engines.base import TensorSpec, WeightUpdate


class ModelWeights:
    """Updates in place, so that every view of a parameter (a tied head, for one) follows.

    An EMA of a model that is served in half precision needs float32 masters: its steps are smaller
    than the distance of two bfloat16 numbers. They are made by the first EMA, and cost 4 bytes a
    parameter.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        # A tied weight comes once, under its first name.
        self._parameters = dict(model.named_parameters())
        self._masters: dict[str, Tensor] = {}
        self._intact = True

    def specs(self) -> Mapping[str, TensorSpec]:
        return {
            name: TensorSpec(tuple(p.shape), str(p.dtype).removeprefix("torch."))
            for name, p in self._parameters.items()
        }

    def require_intact(self) -> None:
        """Only a device that fails half-way can spoil an update; then nothing may be scored."""
        if not self._intact:
            raise WrongState(
                "an update of the weights failed half-way, they are of no version",
                hint="push a full replacement, or restart the teacher",
            )

    @torch.no_grad()
    def apply(self, update: WeightUpdate) -> None:
        """A valid update. What fails here leaves weights that `require_intact` refuses."""
        if update.tau is not None:
            self.require_intact()
        self._intact = False
        for name, parameter in self._parameters.items():
            spec, data = update.tensors[name]
            pushed = torch.from_numpy(data).view(getattr(torch, spec.dtype)).view(spec.shape)
            pushed = pushed.to(parameter.device)
            if update.tau is not None:
                pushed = self._averaged(name, parameter, pushed, update.tau)
            elif name in self._masters:
                self._masters[name].copy_(pushed)
            parameter.copy_(pushed)
        self._intact = True

    def _averaged(self, name: str, parameter: Tensor, theta: Tensor, tau: float) -> Tensor:
        phi = parameter.data
        if phi.dtype is not torch.float32:
            if name not in self._masters:
                self._masters[name] = phi.float()
            phi = self._masters[name]
        return phi.mul_(tau).add_(theta.float(), alpha=1 - tau)

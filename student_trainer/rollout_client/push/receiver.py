"""The side of a push that receives: one process of a rollout engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from student_trainer.rollout_client.push.group import GroupBroken, Seat, WeightGroup
from student_trainer.rollout_client.push.stream import WeightSpec, received


class WeightReceiver:
    """Receives weights. It stays in its group until the trainer names another, or it breaks."""

    def __init__(self, device: torch.device) -> None:
        """`device`: of the engine; weights come there, with gloo to the CPU."""
        self._device = device
        self._group: WeightGroup | None = None

    def receive(self, seat: Seat, weights: Sequence[WeightSpec]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weight), in the group of `seat`. Raises GroupBroken."""
        try:
            group = self._joined(seat)
            yield from received(weights, seat.bucket_bytes, group.device, group.broadcast)
        except GroupBroken:
            self.leave()
            raise

    def leave(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
        self._group = None

    def _joined(self, seat: Seat) -> WeightGroup:
        if self._group is None or self._group.seat != seat:
            self.leave()
            device = torch.device("cpu") if seat.backend == "gloo" else self._device
            self._group = WeightGroup(seat, device)
        return self._group

"""The receiving side of a push: one process of a rollout engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from student_trainer.rollout_client.push.group import GroupBroken, Seat, WeightGroup
from student_trainer.rollout_client.push.stream import WeightSpec, receive_weights


class WeightReceiver:
    """Receives weights. Stays in its group until the trainer names another, or the group breaks."""

    def __init__(self, device: torch.device) -> None:
        """`device`: of the engine; weights arrive on it, or with gloo on the CPU."""
        self._device = device
        self._group: WeightGroup | None = None

    def receive(self, seat: Seat, weights: Sequence[WeightSpec]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weight), in the group of `seat`. Raises GroupBroken."""
        try:
            group = self._join_group(seat)
            yield from receive_weights(weights, seat.bucket_bytes, group.device, group.broadcast)
        except GroupBroken:
            self.leave()
            raise

    def leave(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
        self._group = None

    def _join_group(self, seat: Seat) -> WeightGroup:
        if self._group is None or self._group.seat != seat:
            self.leave()
            device = torch.device("cpu") if seat.backend == "gloo" else self._device
            self._group = WeightGroup(seat, device)
        return self._group

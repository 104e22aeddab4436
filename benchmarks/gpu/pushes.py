"""Pushes of weights to an engine in this process's own children, for `rollouts.py`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import torch

from student_trainer.checkpoints.export import PublishedWeights
from student_trainer.rollout_client.order import WeightsVersion
from student_trainer.rollout_client.push.group import Backend, Store, WeightGroup
from student_trainer.rollout_client.push.shared_bucket import SharedBucket
from student_trainer.rollout_client.push.stream import WeightSender, WeightsOffer, WeightSpec
from student_trainer.rollout_client.snapshots import Snapshots


def list_backends(device: str) -> list[Backend]:
    """Return the kinds of groups that this machine can form."""
    if device == "cpu":
        return ["gloo"]
    return ["ipc", "nccl"] if torch.cuda.device_count() > 1 else ["ipc"]


class PushChannel:
    """Pushes the student's weights to the engine through a process group of the two."""

    def __init__(
        self, snapshots: Snapshots, engine: Any, runner: asyncio.Runner, backend: Backend
    ) -> None:
        self.name = "ipc" if backend == "ipc" else "broadcast"
        self._snapshots, self._engine, self._runner = snapshots, engine, runner
        # NCCL allows one process of a group on a GPU: the weights are copied to another one first.
        device = {"gloo": "cpu", "ipc": "cuda:0", "nccl": "cuda:1"}[backend]
        self._device = torch.device(device)
        self._store = Store("127.0.0.1")
        self._seat = self._store.seat(backend, 2)
        self._bucket: SharedBucket | None = None
        if backend == "ipc":
            size = self._seat.bucket_bytes
            data = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._bucket = SharedBucket(data)
            self._seat = replace(self._seat, memory=self._bucket.handle)
        self._group: WeightGroup | None = None

    def push(self, version: WeightsVersion) -> None:
        """Send the current weights, and wait until the engine has verified them."""
        probe, dtype = self._snapshots.probe()
        published = self._snapshots.published()
        specs = [WeightSpec.describe(name, size) for name, size in published.sizes.items()]
        offer = WeightsOffer(replace(version, pushed=True), dtype, specs, probe)

        async def receive() -> None:
            sending = asyncio.to_thread(self._send, published, specs)
            await asyncio.gather(self._engine.receive(offer, self._seat.shifted_by(1)), sending)

        self._runner.run(receive())

    def _send(self, published: PublishedWeights, specs: list[WeightSpec]) -> None:
        if self._group is None:
            self._group = WeightGroup(self._seat, self._device, self._bucket)
        sender = WeightSender(specs, self._seat.bucket_bytes, self._device, self._group.broadcast)
        for group in published.iterate_layers(lambda: True, self._device):
            for name, weight in group.items():
                sender.send(name, weight)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()

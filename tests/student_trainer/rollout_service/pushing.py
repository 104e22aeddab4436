"""Trainers that push the weights of students to rollout services."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from student_trainer.parallel.collectives import make_accelerator
from student_trainer.parallel.shards import local, own_slices
from student_trainer.rollout_client.engine_client import EngineClient
from student_trainer.rollout_client.order import InFlight
from student_trainer.rollout_client.push import group
from student_trainer.rollout_client.push.pusher import WeightPusher
from student_trainer.rollout_client.push.versions import PushedVersions
from student_trainer.rollout_client.snapshots import Snapshots
from tests.student_trainer.saving import LIMIT
from tests.student_trainer.teachers.anchors import spread_student

SMALL_BUCKET = 4096  # small, so that a small student has many buckets


class Trainer:
    """One process of a trainer whose student gets the weights of another model at each step."""

    def __init__(
        self,
        model: Any,
        root: Path,
        addresses: Sequence[str],
        *,
        sharding: str = "none",
        attempt: int = 1,
        in_flight: InFlight = "drain",
    ) -> None:
        accelerator = make_accelerator(LIMIT)
        self.student: Any = spread_student(model, sharding)
        self.client = EngineClient(addresses, rank=accelerator.process_index)
        self.pusher: Any = None
        if accelerator.is_main_process:
            self.pusher = WeightPusher(self.client.replicas, torch.device("cpu"), 60.0)
        snapshots = Snapshots(
            accelerator,
            self.student,
            root,
            job="run",
            attempt=attempt,
            dtype=torch.float32,
            adapters=False,
            in_flight=in_flight,
            probe_ids=torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]]),
            tokens_per_micro_batch=64,
        )
        self.versions = PushedVersions(accelerator, snapshots, self.client.pushed, self.pusher)

    def push(self, number: int, model: Any) -> Any:
        """Copy the weights of a model, and push them as version `number`."""
        with torch.no_grad():
            weights = dict(model.named_parameters())
            for name, parameter in self.student.trained.model.named_parameters():
                local(parameter).copy_(weights[name][own_slices(parameter)])
        return self.versions.push(number)

    def close(self) -> None:
        self.client.close()
        self.versions.close()


@contextmanager
def open_trainer(*arguments: Any, **options: Any) -> Iterator[Trainer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "BUCKET_BYTES", SMALL_BUCKET)
        trainer = Trainer(*arguments, **options)
        try:
            yield trainer
        finally:
            trainer.close()

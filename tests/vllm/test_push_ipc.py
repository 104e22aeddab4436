"""Weights through memory of a GPU that trainer and engine share."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA IPC needs a GPU"),
    pytest.mark.timeout(1800),
]

from student_trainer.rollout_client.push.pusher import WeightPusher  # noqa: E402
from tests.student_trainer.rollout_service.pushing import open_trainer  # noqa: E402
from tests.vllm.test_rollout_kills import assert_exact, start  # noqa: E402
from tests.vllm.test_rollout_pushes import order, students_in  # noqa: E402


def test_an_engine_on_the_same_gpu_reads_the_trainers_buffer(tmp_path: Path) -> None:
    students = students_in(tmp_path)
    service = start(students[0], tmp_path / "log")
    try:
        with open_trainer(
            students[0].frozen().model, tmp_path / "weights", [service.address]
        ) as weight_trainer:
            device = torch.device("cuda", 0)
            weight_trainer.versions._pusher = WeightPusher(
                weight_trainer.client.replicas, device, 60.0, shared=True
            )
            for number in (0, 1, 2):
                pushed = weight_trainer.push(number, students[number].model)
                assert pushed.pushed
                sampling_order = order(pushed, 40)
                assert_exact(
                    students, sampling_order, list(weight_trainer.client.sample(sampling_order))
                )
    finally:
        service.close()

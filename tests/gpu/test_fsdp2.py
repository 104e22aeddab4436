"""FSDP2 with one rank, over NCCL on a GPU, learns as a single process."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed

from benchmarks.gpu.training import UpdateSizes, make_example
from student_trainer.data.packing import micro_batches
from student_trainer.loop.optimizer import clip_gradients
from student_trainer.model.student import Student
from student_trainer.objectives.cross_entropy import CrossEntropyObjective
from student_trainer.parallel.collectives import make_accelerator
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.parallel.shards import full_tensor
from tests.gpu.differences import relative_difference
from tests.gpu.test_resume import own_process_group
from tests.student_trainer import tiny

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_two_updates() -> None:
    sizes = UpdateSizes(len(tiny.tokenizer()), 24, 8, 4, 48, 1, {})
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    weights = []
    with own_process_group():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        accelerator = make_accelerator(timedelta(minutes=2))
        for kind in (Replicated, Sharded):
            student = kind(accelerator, Student(tiny.model(seed=3, layers=2), bf16=True))
            optimizer = torch.optim.AdamW(student.trained.parameters(), lr=1e-3, fused=True)
            objective = CrossEntropyObjective()
            for _ in range(2):
                for group in micro_batches([make_example(sizes, i) for i in range(4)], 48):
                    batch = objective.batch(group, student.device, "padded")
                    output = student(batch, objective.loss(batch), 1.0, False)
                    output.loss_sum.backward()
                clip_gradients(student, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            weights.append(
                {
                    name.replace("module.", ""): full_tensor(parameter.detach()).cpu()
                    for name, parameter in student.trained.named_parameters()
                }
            )
    replicated, sharded = weights
    assert replicated.keys() == sharded.keys()
    for name, weight in replicated.items():
        assert relative_difference(sharded[name], weight) < 2e-3, name

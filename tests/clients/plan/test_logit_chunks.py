"""The rows of a chunk of logits, by vocabulary and memory, in the trainer and in the plan."""

from __future__ import annotations

import pytest
import torch

from clients.data.models.shape import ModelShape
from clients.plan import memory
from clients.plan.memory import Load
from student_trainer.losses.fused import projection
from student_trainer.losses.fused.projection import count_chunk_rows

GIB = 1 << 30


@pytest.mark.parametrize(
    ("vocabulary", "gib", "rows"),
    [
        (151_936, 24, 1024),  # the least
        (151_936, 40, 1408),
        (151_936, 80, 2944),
        (151_936, 141, 4096),  # the most
        (32_000, 80, 4096),
        (262_144, 80, 1664),
    ],
)
def test_rows_of_a_gpu(vocabulary: int, gib: int, rows: int) -> None:
    assert count_chunk_rows(vocabulary, gib * GIB) == rows
    if rows > 1024:
        assert 6 * vocabulary * rows <= gib * GIB / 32


@pytest.mark.parametrize(
    ("vocabulary", "itemsize", "rows"), [(151_936, 4, 128), (1024, 4, 16_384), (1024, 8, 8192)]
)
def test_rows_of_a_cpu(vocabulary: int, itemsize: int, rows: int) -> None:
    assert count_chunk_rows(vocabulary, None, itemsize=itemsize) == rows


def test_the_trainer_divides_its_rows_by_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "_gpu_bytes", lambda _: 32 * 6 * 500 * 1160)
    hidden, weight = torch.zeros(1200, 2), torch.zeros(500, 2)
    chunks = projection.logit_chunks(hidden, weight, None, None)
    assert [logits.shape[0] for _, logits in chunks] == [1152, 48]


@pytest.mark.parametrize("gib", [16, 24, 40, 79.1, 80, 141, 180])
@pytest.mark.parametrize("vocabulary", [1000, 32_000, 50_257, 128_256, 151_936, 262_144])
@pytest.mark.parametrize("cuda", [True, False])
def test_the_plan_counts_the_rows_of_the_trainer(cuda: bool, vocabulary: int, gib: float) -> None:
    gpu_bytes = int(gib * GIB)
    shape = ModelShape(2, 64, 128, 2, 2, 32, vocabulary)
    load = Load(shape, 1, False, True, False, 1, 1, cuda=cuda, gpu_bytes=gpu_bytes)
    rows = count_chunk_rows(vocabulary, gpu_bytes if cuda else None)
    assert memory.count_chunk_rows(load) == rows

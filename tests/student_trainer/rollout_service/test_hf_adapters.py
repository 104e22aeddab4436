"""The hf engine with a student that trains LoRA adapters: only adapters are loaded."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from clients.config.tables.common import LoraConfig, StudentConfig
from protos.errors import Corrupt
from student_trainer.checkpoints.export import write_adapters
from student_trainer.model.loading import load_model
from student_trainer.model.lora import trainable_weights
from student_trainer.rollout_client.order import Order
from student_trainer.rollout_client.snapshot import seal
from student_trainer.rollout_service.engines.hf import HfRolloutEngine
from student_trainer.rollouts.sampler import SampledTokens
from tests.student_trainer.rollout_service.in_process import sample_in_process
from tests.student_trainer.rollout_service.material import (
    assert_same,
    order,
    probe_of,
    snapshot,
    student,
)

RANK = 3


def load_adapted(path: Path, number: int, rank: int = RANK) -> Any:
    """Return the student of `path` with the adapters of version `number`, which change answers."""
    lora = LoraConfig(rank=rank, alpha=5.0)
    torch.manual_seed(number)
    model = load_model(StudentConfig(model=str(path), lora=lora)).eval()
    with torch.no_grad():
        for name, weight in trainable_weights(model).items():
            if ".lora_B." in name:
                weight.normal_(std=0.3)
    return model


def write_adapter_snapshot(root: Path, number: int, model: Any) -> Path:
    """Write a snapshot of a model's adapters, and return its directory."""
    directory = root / f"adapters-{number}"
    directory.mkdir(parents=True)
    write_adapters(directory, model, trainable_weights(model))
    seal(directory, number=number, dtype="float32", probe=probe_of(model))
    return directory


def load_and_sample(engine: HfRolloutEngine, sent_order: Order) -> list[SampledTokens]:
    async def load_then_sample() -> list[SampledTokens]:
        await engine.load(sent_order.weights)
        return [tokens async for _, tokens in engine.sample(sent_order)]

    return asyncio.run(load_then_sample())


def test_bits_of_the_trainers_process(student_path: Path, tmp_path: Path) -> None:
    """Trainer and engine sample with unmerged adapters.

    The engine uses the snapshot's alpha, not its own.
    """
    engine = HfRolloutEngine(str(student_path), dtype="float32", lora_rank=RANK)
    tokens_by_load: list[list[int]] = []
    for number in (1, 2, 1):
        model = load_adapted(student_path, number)
        directory = write_adapter_snapshot(tmp_path / str(len(tokens_by_load)), number, model)
        assert (directory / "adapter_model.safetensors").stat().st_size < 50_000
        sequences = load_and_sample(engine, sent_order := order(directory, number=number))
        for sequence, expected in zip(sequences, sample_in_process(sent_order, model), strict=True):
            assert_same(sequence, expected)
        tokens_by_load.append(
            [int(token) for sequence in sequences for token in sequence.token_ids]
        )
    assert tokens_by_load[0] == tokens_by_load[2] != tokens_by_load[1]


def test_what_is_no_adapter_of_the_student_is_refused(student_path: Path, tmp_path: Path) -> None:
    engine = HfRolloutEngine(str(student_path), dtype="float32", lora_rank=RANK)
    full_engine = HfRolloutEngine(str(student_path), dtype="float32")
    adapters = order(write_adapter_snapshot(tmp_path, 1, load_adapted(student_path, 1)))
    other_rank = order(
        write_adapter_snapshot(tmp_path / "rank", 1, load_adapted(student_path, 1, rank=4))
    )
    weights = order(snapshot(tmp_path, 1, student(1)))
    for tested_engine, sent_order, match in (
        (engine, weights, "has model.embed_tokens.weight, which the model"),
        (engine, other_rank, r"lora_A.weight in shape \[4, 96\], but the model .* has \[3, 96\]"),
        (
            full_engine,
            adapters,
            "lora_A.weight, which the model of the rollout service does not have",
        ),
    ):
        with pytest.raises(Corrupt, match=match):
            load_and_sample(tested_engine, sent_order)


@pytest.mark.parametrize("what", ["never delivered", "another alpha"])
def test_adapters_that_are_not_the_trainers_are_refused(
    student_path: Path, tmp_path: Path, what: str
) -> None:
    engine = HfRolloutEngine(str(student_path), dtype="float32", lora_rank=RANK)
    model = load_adapted(student_path, 1)
    directory = write_adapter_snapshot(tmp_path, 1, model)
    if what == "never delivered":
        write_adapters(
            directory,
            load_adapted(student_path, 2),
            trainable_weights(load_adapted(student_path, 2)),
        )
    else:
        file = directory / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": 6}))
    with pytest.raises(Corrupt, match="the checksum of adapter_"):
        load_and_sample(engine, order(directory))
    seal(directory, number=1, dtype="float32", probe=probe_of(model))
    with pytest.raises(Corrupt, match="does not have the weights of this version"):
        load_and_sample(engine, order(directory))

"""AdamW with 8-bit moments: rounded as published, and resumed exactly by other process counts.

`make test-8bit` installs torchao, which `make test` does not.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from clients.config.tables.common import TrainConfig
from clients.runs.directory import RunDirectory
from clients.runs.metrics_file import read_points
from clients.runs.progress import Progress
from protos.errors import InvalidInput
from student_trainer.assembly import assemble
from student_trainer.checkpoints import checkpoint
from student_trainer.checkpoints.optimizer_state import BLOCK, is_quantized
from student_trainer.loop.optimizer import make_optimizer, set_learning_rate
from student_trainer.parallel.shards import local, own_slices
from tests.forks import Forks
from tests.student_trainer import tiny
from tests.student_trainer.saving import save_checkpoint
from tests.student_trainer.teachers.anchors import spread_student

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao"),
    pytest.mark.filterwarnings("ignore"),  # of torchao's import
]
EIGHT_BIT = TrainConfig(optimizer="adamw_8bit", learning_rate=1e-2)


def student() -> Any:
    """Rows of 64 and 96, and 70 embeddings, which 4 processes cannot share evenly."""
    config = Qwen3Config(
        vocab_size=70,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


@pytest.fixture(autouse=True)
def _force_eager() -> Iterator[None]:
    """Run torchao's code without compilation, which would take minutes."""
    with torch.compiler.set_stance("force_eager"):
        yield


def optimizer_of(model: Any, settings: TrainConfig = EIGHT_BIT) -> torch.optim.Optimizer:
    return make_optimizer(settings, model)


def step_once(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * seed + number)
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = torch.zeros_like(parameter)
        local(parameter.grad).copy_(gradient[own_slices(parameter)])
    optimizer.step()


def test_moments_are_rounded_to_the_nearest_number_of_their_block() -> None:
    model = student()
    optimizer = optimizer_of(model)
    step_once(model, optimizer, 0)
    kinds = set()
    for name, parameter in model.named_parameters():
        moment = optimizer.state[parameter]["exp_avg"]
        exact = (0.1 * parameter.grad.double()).reshape(-1)
        kinds.add((parameter.shape[-1], hasattr(moment, "codes")))
        if not hasattr(moment, "codes"):
            assert torch.allclose(moment.double().reshape(-1), exact, rtol=1e-6), name
            continue
        blocks = exact.reshape(-1, BLOCK)
        block_max = blocks.abs().amax(1, keepdim=True)
        distance = (blocks[:, :, None] / block_max[:, :, None] - moment.qmap.double()).abs()
        nearest = moment.qmap.double()[distance.argmin(2)] * block_max
        assert torch.allclose(moment.dequantize().double().reshape(-1, BLOCK), nearest, rtol=1e-5)
    # Rows of 96 are no multiple of a block, and norms are too small for one.
    assert {(64, True), (128, True), (96, False), (64, False)} == kinds


def test_the_learning_rate_of_an_update_is_the_one_set() -> None:
    model = student()
    weights_before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = optimizer_of(model)
    set_learning_rate(optimizer, 0.5)
    step_once(model, optimizer, 0)
    for weight, parameter in zip(weights_before, model.parameters(), strict=True):
        # The first update of Adam is the sign of the gradient.
        assert torch.allclose(weight - parameter, 0.5 * parameter.grad.sign(), atol=1e-3)


def continue_run(root: Path, sharding: str, resumed_step: int | None, update: int) -> None:
    """Load the checkpoint of `resumed_step`, make one update, and save it."""
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        checkpoint_path = checkpoint.checkpoint_path(root, resumed_step) if resumed_step else None
        model = student()
        if checkpoint_path is not None:
            model = type(model).from_pretrained(checkpoint_path / "model")
        student_model = spread_student(model, sharding).trained.model
        optimizer = optimizer_of(student_model)
        if checkpoint_path is not None:
            checkpoint.load_optimizer(checkpoint_path, student_model, optimizer)
        step_once(student_model, optimizer, update)
        words = tiny.tokenizer()
        save_checkpoint(root, update, model=student_model, tokenizer=words, optimizer=optimizer)


def test_other_numbers_of_processes_resume_it_exactly(tmp_path: Path) -> None:
    """One process without a stop, against 2, 9, 1 and 4 processes with a stop after every update.

    With 9 processes, the last ones have no row of some weights.
    """
    model = student()
    optimizer = optimizer_of(model)
    worlds = (2, 9, 1, 4)
    for update, world in enumerate(worlds, 1):
        step_once(model, optimizer, update)
        words = tiny.tokenizer()
        expected_path = save_checkpoint(
            tmp_path / "expected", update, model=model, tokenizer=words, optimizer=optimizer
        )
        group, resumed_step = tmp_path / f"group-{update}", update - 1 or None
        forks = Forks(world, group, continue_run, tmp_path / "run", "fsdp2", resumed_step, update)
        assert forks.wait() == [0] * world
        resumed_path = checkpoint.checkpoint_path(tmp_path / "run", update)
        for name in ("optimizer.safetensors", "model/model.safetensors"):
            assert (resumed_path / name).read_bytes() == (expected_path / name).read_bytes(), (
                world,
                name,
            )


@pytest.mark.parametrize("settings", [EIGHT_BIT, TrainConfig()])
def test_the_state_of_the_other_optimizer_is_refused(tmp_path: Path, settings: TrainConfig) -> None:
    model = student()
    optimizer = optimizer_of(model, settings)
    step_once(model, optimizer, 0)
    words = tiny.tokenizer()
    path = save_checkpoint(tmp_path, 1, model=model, tokenizer=words, optimizer=optimizer)
    other_settings = TrainConfig() if settings is EIGHT_BIT else EIGHT_BIT
    with pytest.raises(InvalidInput, match="another optimizer") as caught:
        checkpoint.load_optimizer(path, model, optimizer_of(model, other_settings))
    assert caught.value.field == "train.optimizer"


def test_a_job_with_the_key_trains_and_resumes(material: tiny.Material, tmp_path: Path) -> None:
    path = tiny.save(student(), tiny.tokenizer(), tmp_path / "student")
    options = {
        "student__model": str(path),
        "train__optimizer": "adamw_8bit",
        "train__schedule": "constant",
    }

    def losses(name: str, *ends: int) -> dict[int, float]:
        """Train to each of the steps in a new attempt, and return the losses by step."""
        run = RunDirectory.create(tmp_path / name, tiny.sft_job(material, **options))
        for attempt, end in enumerate(ends, 1):
            config = tiny.sft_job(material, **options, max_steps=end)
            progress = Progress(
                run, attempt=attempt, max_steps=end, main=True, terminated=lambda: False
            )
            trainer = assemble(config, run, {}, progress, attempt, None)
            assert trainer.train() == "succeeded"
            assert any(
                hasattr(moments["exp_avg"], "codes") for moments in trainer.optimizer.state.values()
            )
        return {
            point.step: point.metrics["loss"] for point in read_points(run.metrics) if point.step
        }

    assert losses("twice", 3, 6) == losses("once", 6)


def test_a_moment_takes_a_quarter() -> None:
    model = student()
    optimizer = optimizer_of(model)
    step_once(model, optimizer, 0)
    weight = model.get_input_embeddings().weight
    assert is_quantized(weight)
    moment = optimizer.state[weight]["exp_avg"]
    assert moment.codes.nbytes + moment.scale.nbytes == weight.numel() * (1 + 4 / BLOCK)

"""A run that is killed within a step and resumed has the weights of an uninterrupted run.

On the GPU, if there is one. Every run is bit-identical to itself on a CPU. On a GPU that is not
certain: the backward pass of some attention kernels adds in any order.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor

from clients.runs.directory import RunDirectory
from clients.runs.progress import Progress
from student_trainer.assembly import assemble
from student_trainer.parallel.shards import full_tensor
from student_trainer.rewards import make_rewards
from tests.gpu.differences import relative_difference
from tests.student_trainer import tiny

pytestmark = pytest.mark.gpu

STEPS, KILLED_IN = 6, 4

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)


class Killed(BaseException):
    """The end of a process, which no code handles."""


@contextmanager
def own_process_group() -> Iterator[None]:
    """Leave no group of one, and no Accelerator that knows it, to the next test."""
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        AcceleratorState._reset_state()
        PartialState._reset_state()


def train(path: Path, config: Any, *, killed_in: int = 0) -> dict[str, Tensor]:
    """Run an attempt of a job; return its weights. It ends within the step `killed_in`."""
    attempt = 2 if path.exists() else 1
    run = RunDirectory(path) if path.exists() else RunDirectory.create(path, config)
    progress = Progress(run, attempt=attempt, max_steps=STEPS, main=True, terminated=lambda: False)
    reward = getattr(config, "reward", None)
    with nullcontext() if reward is None else make_rewards(reward) as rewards:
        trainer = assemble(config, run, {}, progress, attempt, None, rewards)
        learn = trainer.learner.learn

        def learn_or_die(step: int, *arguments: Any) -> Any:
            means = learn(step, *arguments)
            if step == killed_in:
                raise Killed
            return means

        trainer.learner.learn = learn_or_die  # type: ignore[method-assign]
        assert trainer.train() == "succeeded"
        return {
            name: full_tensor(parameter.detach()).cpu().clone()
            for name, parameter in trainer.student.trained.model.named_parameters()
        }


def require_equal_weights(folder: Path, config: Any) -> None:
    with own_process_group():
        whole = train(folder / "whole", config)
        with pytest.raises(Killed):
            train(folder / "killed", config, killed_in=KILLED_IN)
        resumed = train(folder / "killed", config)
    differences = {name: relative_difference(resumed[name], whole[name]) for name in whole}
    unequal = [name for name in whole if not torch.equal(resumed[name], whole[name])]
    assert not unequal, f"{len(unequal)} of {len(whole)} weights: {max(differences.values())}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch.compile and of FSDP2
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="anchor"),
        pytest.param({"method__advantages": "gae"}, id="critic"),
        pytest.param({"student__lora": {"rank": 4}}, id="lora"),
        pytest.param({"method__ratio": "sequence"}, id="gspo"),
        pytest.param({"student__dtype": "float32"}, id="float32"),
        pytest.param({"student__gradient_checkpointing": "selective"}, id="selective"),
        pytest.param({"train__sharding": "fsdp2", "train__cpu_offload": True}, id="offload"),
        pytest.param({"train__optimizer": "adamw_8bit"}, id="8bit", marks=needs_torchao),
    ],
)
def test_rl(changes: dict[str, Any], material: tiny.Material, tmp_path: Path) -> None:
    schedule = {"max_steps": STEPS, "checkpoint__every": 2, "eval__every": STEPS}
    require_equal_weights(tmp_path, tiny.rl_job(material, **schedule, **changes))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_sft_with_compiled_layers(material: tiny.Material, tmp_path: Path) -> None:
    schedule = {"max_steps": STEPS, "checkpoint__every": 2, "eval__every": STEPS}
    config = tiny.sft_job(material, student__compile=True, **schedule)
    require_equal_weights(tmp_path, config)

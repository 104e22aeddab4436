"""Learning from rewards in several processes: the curve of one, wherever the anchor lies, and with
a critic. As many cases as DISTILL_REPEATS says.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from clients.runs.directory import RunDirectory
from tests.end_to_end.conftest import Once
from tests.end_to_end.forked_trainer import finish
from tests.end_to_end.processes import metrics_of, new_run
from tests.end_to_end.test_two_processes import assert_close

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

REPEATS = int(os.environ.get("DISTILL_REPEATS", "1"))
CASES = [
    (4, "fsdp2", "group"),
    (2, "fsdp2", "gae"),
    (2, "none", "group"),
    (4, "none", "gae"),
    (2, "fsdp2", "group"),
    (2, "none", "gae"),
]
# 9 groups do not divide evenly among the processes.
GROUPS = {"max_steps": 4, "eval__every": 4, "train__prompts_per_step": 9}


def run_rl_job(
    material: Material, path: Path, advantages: str, processes: int = 1, sharding: str = "none"
) -> RunDirectory:
    from tests.student_trainer.tiny import rl_job

    options = {
        "train__processes": processes,
        "train__sharding": sharding,
        "method__advantages": advantages,
    }
    return finish(new_run(path, rl_job(material, **GROUPS, **options)))


def load_tensors(run: RunDirectory, file: str) -> dict[str, torch.Tensor]:
    return load_file(run.checkpoints / "step-000004" / file)


@pytest.mark.parametrize(("processes", "sharding", "advantages"), CASES[:REPEATS])
def test_the_same_curve_as_one_process(
    material: Material, once: Once, processes: int, sharding: str, advantages: str, tmp_path: Path
) -> None:
    single_run = RunDirectory(
        once(f"rl-alone-{advantages}", lambda path: run_rl_job(material, path, advantages))
    )
    run = run_rl_job(material, tmp_path / "run", advantages, processes, sharding)
    lines = metrics_of(run)
    assert_close(lines, metrics_of(single_run))
    assert lines[-1]["anchor/version"] == 4
    assert lines[-1]["reward/std"] > 0, "nothing was learned from"
    # The estimate of a small KL may have either sign.
    assert abs(lines[-1]["kl/anchor"]) > 1e-5, "the anchor pulled at nothing"
    for file in ["anchor.safetensors"] + ["critic.safetensors"] * (advantages == "gae"):
        for name, value in load_tensors(single_run, file).items():
            torch.testing.assert_close(load_tensors(run, file)[name], value, rtol=0, atol=1e-5)
            assert value.any(), f"{name} was never learned"


@pytest.mark.slow
def test_dynamic_sampling_in_two_processes(material: Material, tmp_path: Path) -> None:
    """Both processes make the same number of rounds and end with their share of groups."""
    from tests.student_trainer.tiny import rl_job

    rounds = {"method__dynamic_sampling": 3, "method__rollouts_per_prompt": 2}
    job = rl_job(material, **GROUPS, **rounds, train__processes=2, train__sharding="fsdp2")
    lines = metrics_of(finish(new_run(tmp_path / "run", job)))
    assert len(lines) == 5
    for line in lines[1:]:
        assert line["sampling/rounds"] in (1, 2, 3)
        assert (line["sampling/dropped"] > 0) == (line["sampling/rounds"] > 1)
    assert any(line["sampling/dropped"] > 0 for line in lines[1:])

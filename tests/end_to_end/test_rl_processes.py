"""Learning from rewards in several processes: the curve of one, wherever the anchor lies. All of
them with a DISTILL_REPEATS of 8; 2, and one of them, by default.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from clients.run_directory import RunDirectory
from tests.end_to_end.conftest import Once
from tests.end_to_end.forked_trainer import finish
from tests.end_to_end.processes import metrics_of, new_run
from tests.end_to_end.test_two_processes import assert_close

if TYPE_CHECKING:
    from tests.trainer.tiny import Material

REPEATS = int(os.environ.get("DISTILL_REPEATS", "2"))
PROCESSES = [(4, "fsdp2"), (2, "none"), (2, "fsdp2"), (4, "none")]
# 9 groups are no even number for any of them.
GROUPS = {"max_steps": 4, "eval__every": 4, "train__prompts_per_step": 9}


def made(material: Material, path: Path, processes: int, sharding: str) -> RunDirectory:
    from tests.trainer.tiny import rl_job

    how = {"train__processes": processes, "train__sharding": sharding}
    return finish(new_run(path, rl_job(material, **GROUPS, **how)))


@pytest.fixture(scope="module")
def alone(material: Material, once: Once) -> RunDirectory:
    return RunDirectory(once("rl-alone", lambda path: made(material, path, 1, "none")))


def anchors(run: RunDirectory) -> dict[str, torch.Tensor]:
    return load_file(run.checkpoints / "step-000004" / "anchor.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "sharding"), PROCESSES[: REPEATS // 2])
def test_the_same_curve_as_one_process(
    material: Material, alone: RunDirectory, processes: int, sharding: str, tmp_path: Path
) -> None:
    run = made(material, tmp_path / "run", processes, sharding)
    lines = metrics_of(run)
    assert_close(lines, metrics_of(alone))
    assert lines[-1]["anchor/version"] == 4
    assert lines[-1]["reward/std"] > 0, "nothing was learned from"
    # An estimate of a small number: it may have either sign.
    assert abs(lines[-1]["kl/anchor"]) > 1e-5, "the anchor pulled at nothing"
    for name, value in anchors(alone).items():
        torch.testing.assert_close(anchors(run)[name], value, rtol=0, atol=1e-5)

"""Tensor or context parallelism in groups of two, sharded by FSDP2, equals one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from clients.runs.directory import RunDirectory
from tests.end_to_end.conftest import Once
from tests.end_to_end.forked_trainer import finish
from tests.end_to_end.processes import metrics_of, new_run, weights
from tests.end_to_end.test_rl_processes import GROUPS, load_tensors
from tests.end_to_end.test_sharded import (
    UNEVEN,
    finish_in_one_process,
    run_job_once,
    run_until_killed,
)
from tests.end_to_end.test_two_processes import assert_close

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material


@pytest.fixture(
    params=[
        "train__tensor_parallel",
        "train__context_parallel",
    ]
)
def group_options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of four processes: the groups share the matrices, or the tokens of sequences."""
    return {"train__processes": 4, "train__sharding": "fsdp2", request.param: 2}


@pytest.mark.slow
def test_the_same_curve_as_one_process(
    material: Material, teacher: str, once: Once, tmp_path: Path, group_options: dict[str, Any]
) -> None:
    """Without interruption; killed and resumed by four processes; killed and resumed by one."""
    from tests.student_trainer.tiny import curve, job

    single_run = run_job_once(once, "alone", material, teacher, **UNEVEN)
    grouped_run = finish(
        new_run(tmp_path / "groups", job(material, teacher, **UNEVEN, **group_options))
    )
    assert_close(metrics_of(grouped_run), metrics_of(single_run))
    run = run_until_killed(
        new_run(tmp_path / "run", job(material, teacher, **UNEVEN, **group_options))
    )
    assert_close(metrics_of(finish_in_one_process(run, tmp_path / "one")), metrics_of(single_run))
    finish(run, 2)
    assert curve(metrics_of(run)) == curve(metrics_of(grouped_run))
    assert weights(run) == weights(grouped_run)


@pytest.mark.slow
def test_rl_with_anchor_and_critic(
    material: Material, once: Once, tmp_path: Path, group_options: dict[str, Any]
) -> None:
    """Curve, anchor and critic equal those of one process."""
    from tests.student_trainer.tiny import rl_job

    changes = GROUPS | {"method__advantages": "gae"}
    single_run = RunDirectory(
        once("rl-alone-gae", lambda path: finish(new_run(path, rl_job(material, **changes))))
    )
    run = finish(new_run(tmp_path / "run", rl_job(material, **changes, **group_options)))
    lines = metrics_of(run)
    assert_close(lines, metrics_of(single_run))
    assert lines[-1]["anchor/version"] == 4
    assert abs(lines[-1]["kl/anchor"]) > 1e-5, "the anchor pulled at nothing"
    for file in ("anchor.safetensors", "critic.safetensors"):
        for name, value in load_tensors(single_run, file).items():
            torch.testing.assert_close(load_tensors(run, file)[name], value, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_bfloat16_and_recomputation(
    material: Material, tmp_path: Path, group_options: dict[str, Any]
) -> None:
    """Gathers, sums and exchanges are in bfloat16; with adapters where groups support them."""
    from tests.student_trainer.tiny import sft_job

    changes = {
        "student__dtype": "bfloat16",
        "student__gradient_checkpointing": "selective",
        "max_steps": 6,
        "eval__every": 3,
    }
    if "train__context_parallel" in group_options:
        changes["student__lora"] = {"rank": 4}
    single_lines, grouped_lines = (
        metrics_of(finish(new_run(tmp_path / name, sft_job(material, **changes, **options))))
        for name, options in (("alone", {}), ("groups", group_options))
    )
    assert [line["step"] for line in single_lines] == [line["step"] for line in grouped_lines]
    for line, expected_line in zip(grouped_lines, single_lines, strict=True):
        assert line.keys() == expected_line.keys()
        for name in {"loss", "eval/cross_entropy"} & line.keys():
            assert line[name] == pytest.approx(expected_line[name], rel=0.01), (name, line["step"])

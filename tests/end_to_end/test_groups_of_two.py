"""Tensor or context parallelism in groups of two, sharded by FSDP2: the run of one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from clients.runs.directory import RunDirectory
from tests.end_to_end.conftest import Once
from tests.end_to_end.forked_trainer import finish
from tests.end_to_end.processes import metrics_of, new_run, weights
from tests.end_to_end.test_rl_processes import GROUPS, tensors
from tests.end_to_end.test_sharded import UNEVEN, in_one_process, killed, made
from tests.end_to_end.test_two_processes import assert_close

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material


@pytest.fixture(
    params=[
        "train__tensor_parallel",
        pytest.param("train__context_parallel", marks=pytest.mark.slow),
    ]
)
def four(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of four processes: the groups share the matrices, or the tokens of sequences."""
    return {"train__processes": 4, "train__sharding": "fsdp2", request.param: 2}


def test_the_same_curve_as_one_process(
    material: Material, teacher: str, once: Once, tmp_path: Path, four: dict[str, Any]
) -> None:
    """Undisturbed; killed and resumed by four; killed and resumed by one."""
    from tests.student_trainer.tiny import curve, job

    alone = made(once, "alone", material, teacher, **UNEVEN)
    groups = finish(new_run(tmp_path / "groups", job(material, teacher, **UNEVEN, **four)))
    assert_close(metrics_of(groups), metrics_of(alone))
    run = killed(new_run(tmp_path / "run", job(material, teacher, **UNEVEN, **four)))
    assert_close(metrics_of(in_one_process(run, tmp_path / "one")), metrics_of(alone))
    finish(run, 2)
    assert curve(metrics_of(run)) == curve(metrics_of(groups))
    assert weights(run) == weights(groups)


@pytest.mark.slow
def test_rl_with_anchor_and_critic(
    material: Material, once: Once, tmp_path: Path, four: dict[str, Any]
) -> None:
    """The curve, the anchor and the critic of one process."""
    from tests.student_trainer.tiny import rl_job

    changes = GROUPS | {"method__advantages": "gae"}
    alone = RunDirectory(
        once("rl-alone-gae", lambda path: finish(new_run(path, rl_job(material, **changes))))
    )
    run = finish(new_run(tmp_path / "run", rl_job(material, **changes, **four)))
    lines = metrics_of(run)
    assert_close(lines, metrics_of(alone))
    assert lines[-1]["anchor/version"] == 4
    assert abs(lines[-1]["kl/anchor"]) > 1e-5, "the anchor pulled at nothing"
    for file in ("anchor.safetensors", "critic.safetensors"):
        for name, value in tensors(alone, file).items():
            torch.testing.assert_close(tensors(run, file)[name], value, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_bfloat16_and_recomputation(
    material: Material, tmp_path: Path, four: dict[str, Any]
) -> None:
    """What is gathered, summed or exchanged is in bfloat16; adapters where groups allow them."""
    from tests.student_trainer.tiny import sft_job

    changes = {
        "student__dtype": "bfloat16",
        "student__gradient_checkpointing": "selective",
        "max_steps": 6,
        "eval__every": 3,
    }
    if "train__context_parallel" in four:
        changes["student__lora"] = {"rank": 4}
    alone, groups = (
        metrics_of(finish(new_run(tmp_path / name, sft_job(material, **changes, **how))))
        for name, how in (("alone", {}), ("groups", four))
    )
    assert [line["step"] for line in alone] == [line["step"] for line in groups]
    for found, expected in zip(groups, alone, strict=True):
        assert found.keys() == expected.keys()
        for name in {"loss", "eval/cross_entropy"} & found.keys():
            assert found[name] == pytest.approx(expected[name], rel=0.01), (name, found["step"])

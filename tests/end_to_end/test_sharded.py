"""FSDP2 over gloo: a share of everything in each process, and the same run as in one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clients.runs.directory import RunDirectory, replace_file
from tests.end_to_end.conftest import Once
from tests.end_to_end.forked_trainer import finish, killed_after_checkpoint
from tests.end_to_end.processes import metrics_of, new_run, weights
from tests.end_to_end.test_two_processes import assert_close

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

# 7 answers, one a micro-batch: one process has more micro-batches than the other. 13 rows
# of embeddings, tied with the head, are no even number either.
UNEVEN = {
    "max_steps": 8,
    "train__prompts_per_step": 7,
    "train__tokens_per_micro_batch": 12,
    "eval__every": 4,
    "eval__prompts": 5,
    "student__gradient_checkpointing": True,
}
# Frozen weights are bfloat16 here, and lie in one group with adapters in float32.
ADAPTED = {
    **UNEVEN,
    "student__lora": {"rank": 4, "train_head": True},
    "student__dtype": "bfloat16",
}
PAIR = {"train__processes": 2, "train__sharding": "fsdp2"}


def made(once: Once, name: str, material: Material, teacher: str, **changes: Any) -> RunDirectory:
    from tests.student_trainer.tiny import job

    config = job(material, teacher, **changes)
    return RunDirectory(once(name, lambda path: finish(new_run(path, config))))


@pytest.fixture(scope="module")
def alone(material: Material, teacher: str, once: Once) -> RunDirectory:
    """One process, undisturbed."""
    return made(once, "alone", material, teacher, **UNEVEN)


@pytest.fixture(scope="module")
def pair(material: Material, teacher: str, once: Once) -> RunDirectory:
    """Two processes, undisturbed."""
    return made(once, "sharded-pair", material, teacher, **UNEVEN, **PAIR)


def killed(run: RunDirectory) -> RunDirectory:
    """Killed once it has the checkpoint of step 4, its first."""
    killed_after_checkpoint(run)
    return run


def in_one_process(run: RunDirectory, path: Path) -> RunDirectory:
    """A copy of the run that goes on alone."""
    shutil.copytree(run.path, path)
    copied = RunDirectory(path)
    config = copied.config()
    groups = {"tensor_parallel": 1, "context_parallel": 1}
    single = {"processes": 1, "sharding": "none", "cpu_offload": False, **groups}
    train = config.train.model_copy(update=single)
    replace_file(copied.job_json, config.model_copy(update={"train": train}).model_dump_json())
    return finish(copied, 2)


def test_the_same_curve_as_one_process(alone: RunDirectory, pair: RunDirectory) -> None:
    assert_close(metrics_of(pair), metrics_of(alone))


@pytest.mark.slow
def test_one_process_with_its_weights_in_host_memory(
    material: Material, teacher: str, alone: RunDirectory, tmp_path: Path
) -> None:
    """A group of one process; killed, and resumed with weights on the device."""
    from tests.student_trainer.tiny import job

    offload = {"train__sharding": "fsdp2", "train__cpu_offload": True}
    run = killed(new_run(tmp_path / "run", job(material, teacher, **UNEVEN, **offload)))
    assert_close(metrics_of(in_one_process(run, tmp_path / "one")), metrics_of(alone))
    assert_close(metrics_of(finish(run, 2)), metrics_of(alone))


@pytest.mark.slow
def test_two_processes_with_their_weights_in_host_memory(
    material: Material, teacher: str, pair: RunDirectory, once: Once
) -> None:
    found = made(once, "offloaded", material, teacher, **UNEVEN, **PAIR, train__cpu_offload=True)
    assert_close(metrics_of(found), metrics_of(pair))


def test_killed_and_resumed_by_two_or_by_one(
    material: Material, teacher: str, alone: RunDirectory, pair: RunDirectory, tmp_path: Path
) -> None:
    from tests.student_trainer.tiny import curve, job

    run = killed(new_run(tmp_path / "run", job(material, teacher, **UNEVEN, **PAIR)))
    assert_close(metrics_of(in_one_process(run, tmp_path / "one")), metrics_of(alone))
    finish(run, 2)
    assert curve(metrics_of(run)) == curve(metrics_of(pair))
    assert weights(run) == weights(pair)


@pytest.mark.slow
def test_bfloat16_is_gathered_as_it_is_computed(
    material: Material, teacher: str, tmp_path: Path
) -> None:
    """The matrices are cast before they are gathered, to what one process casts them to."""
    from tests.student_trainer.tiny import job

    changes = {
        "student__dtype": "bfloat16",
        "student__gradient_checkpointing": True,
        "max_steps": 6,
        "eval__every": 3,
    }
    one, two = (
        metrics_of(finish(new_run(tmp_path / name, job(material, teacher, **changes, **how))))
        for name, how in (("one", {}), ("two", PAIR))
    )
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for found, expected in zip(two, one, strict=True):
        assert found.keys() == expected.keys()
        for name in {"loss", "eval/kl", "kl/teacher"} & found.keys():
            assert found[name] == pytest.approx(expected[name], rel=0.01), (name, found["step"])


@pytest.mark.slow
def test_adapters_killed_with_two_and_resumed_by_one(
    material: Material, teacher: str, tmp_path: Path
) -> None:
    from tests.student_trainer.tiny import job

    alone = finish(new_run(tmp_path / "alone", job(material, teacher, **ADAPTED)))
    run = killed(new_run(tmp_path / "run", job(material, teacher, **ADAPTED, **PAIR)))
    assert_close(metrics_of(in_one_process(run, tmp_path / "one")), metrics_of(alone))
    assert (alone.export / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_an_engine_beside_sharded_processes(
    material: Material, teacher: str, tmp_path: Path
) -> None:
    """No process gathers all weights; one has more held-out answers to score than the other."""
    changes = {**UNEVEN, "max_steps": 4, "eval__prompts": 3, "rollouts__lag": 1}
    from tests.student_trainer.tiny import job

    one, two = (
        finish(new_run(tmp_path / name, job(material, teacher, **changes, **how)))
        for name, how in {"one": {}, "two": PAIR}.items()
    )
    assert_close(metrics_of(two), metrics_of(one))

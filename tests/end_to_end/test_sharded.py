"""FSDP2 over gloo: a sharded run equals the run of one process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clients.runs.directory import RunDirectory, replace_file
from tests.end_to_end.conftest import Once
from tests.end_to_end.forked_trainer import finish, kill_after_checkpoint
from tests.end_to_end.processes import metrics_of, new_run, weights
from tests.end_to_end.test_two_processes import assert_close

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

# 7 answers, one per micro-batch, so that the processes have different numbers of micro-batches. The
# 13 rows of the tied embeddings do not divide evenly either.
UNEVEN = {
    "max_steps": 8,
    "train__prompts_per_step": 7,
    "train__tokens_per_micro_batch": 12,
    "eval__every": 4,
    "eval__prompts": 5,
    "student__gradient_checkpointing": True,
}
# Frozen bfloat16 weights share a group with float32 adapters.
ADAPTED = {
    **UNEVEN,
    "student__lora": {"rank": 4, "train_head": True},
    "student__dtype": "bfloat16",
}
PAIR = {"train__processes": 2, "train__sharding": "fsdp2"}


def run_job_once(
    once: Once, name: str, material: Material, teacher: str, **changes: Any
) -> RunDirectory:
    from tests.student_trainer.tiny import job

    config = job(material, teacher, **changes)
    return RunDirectory(once(name, lambda path: finish(new_run(path, config))))


@pytest.fixture(scope="module")
def single_run(material: Material, teacher: str, once: Once) -> RunDirectory:
    """A run of one process, without interruption."""
    return run_job_once(once, "alone", material, teacher, **UNEVEN)


@pytest.fixture(scope="module")
def sharded_run(material: Material, teacher: str, once: Once) -> RunDirectory:
    """A run of two processes, without interruption."""
    return run_job_once(once, "sharded-pair", material, teacher, **UNEVEN, **PAIR)


def run_until_killed(run: RunDirectory) -> RunDirectory:
    """Kill the run once it has the checkpoint of step 4, its first."""
    kill_after_checkpoint(run)
    return run


def finish_in_one_process(run: RunDirectory, path: Path) -> RunDirectory:
    """Resume a copy of the run in one process."""
    shutil.copytree(run.path, path)
    copied_run = RunDirectory(path)
    config = copied_run.config()
    groups = {"tensor_parallel": 1, "context_parallel": 1}
    changes = {"processes": 1, "sharding": "none", "cpu_offload": False, **groups}
    train = config.train.model_copy(update=changes)
    replace_file(copied_run.job_json, config.model_copy(update={"train": train}).model_dump_json())
    return finish(copied_run, 2)


def test_the_same_curve_as_one_process(single_run: RunDirectory, sharded_run: RunDirectory) -> None:
    assert_close(metrics_of(sharded_run), metrics_of(single_run))


@pytest.mark.slow
def test_one_process_with_its_weights_in_host_memory(
    material: Material, teacher: str, single_run: RunDirectory, tmp_path: Path
) -> None:
    """One process with CPU offload, killed, and resumed with weights on the device."""
    from tests.student_trainer.tiny import job

    offload = {"train__sharding": "fsdp2", "train__cpu_offload": True}
    run = run_until_killed(new_run(tmp_path / "run", job(material, teacher, **UNEVEN, **offload)))
    assert_close(metrics_of(finish_in_one_process(run, tmp_path / "one")), metrics_of(single_run))
    assert_close(metrics_of(finish(run, 2)), metrics_of(single_run))


@pytest.mark.slow
def test_two_processes_with_their_weights_in_host_memory(
    material: Material, teacher: str, sharded_run: RunDirectory, once: Once
) -> None:
    offloaded_run = run_job_once(
        once, "offloaded", material, teacher, **UNEVEN, **PAIR, train__cpu_offload=True
    )
    assert_close(metrics_of(offloaded_run), metrics_of(sharded_run))


@pytest.mark.slow
def test_killed_and_resumed_by_two_or_by_one(
    material: Material,
    teacher: str,
    single_run: RunDirectory,
    sharded_run: RunDirectory,
    tmp_path: Path,
) -> None:
    from tests.student_trainer.tiny import curve, job

    run = run_until_killed(new_run(tmp_path / "run", job(material, teacher, **UNEVEN, **PAIR)))
    assert_close(metrics_of(finish_in_one_process(run, tmp_path / "one")), metrics_of(single_run))
    finish(run, 2)
    assert curve(metrics_of(run)) == curve(metrics_of(sharded_run))
    assert weights(run) == weights(sharded_run)


@pytest.mark.slow
def test_bfloat16_is_gathered_as_it_is_computed(
    material: Material, teacher: str, tmp_path: Path
) -> None:
    """Matrices are cast to bfloat16 before the gather, to the same values as in one process."""
    from tests.student_trainer.tiny import job

    changes = {
        "student__dtype": "bfloat16",
        "student__gradient_checkpointing": True,
        "max_steps": 6,
        "eval__every": 3,
    }
    single_lines, sharded_lines = (
        metrics_of(finish(new_run(tmp_path / name, job(material, teacher, **changes, **options))))
        for name, options in (("one", {}), ("two", PAIR))
    )
    assert [line["step"] for line in single_lines] == [line["step"] for line in sharded_lines]
    for line, expected_line in zip(sharded_lines, single_lines, strict=True):
        assert line.keys() == expected_line.keys()
        for name in {"loss", "eval/kl", "kl/teacher"} & line.keys():
            assert line[name] == pytest.approx(expected_line[name], rel=0.01), (name, line["step"])


@pytest.mark.slow
def test_adapters_killed_with_two_and_resumed_by_one(
    material: Material, teacher: str, tmp_path: Path
) -> None:
    from tests.student_trainer.tiny import job

    single_run = finish(new_run(tmp_path / "alone", job(material, teacher, **ADAPTED)))
    run = run_until_killed(new_run(tmp_path / "run", job(material, teacher, **ADAPTED, **PAIR)))
    assert_close(metrics_of(finish_in_one_process(run, tmp_path / "one")), metrics_of(single_run))
    assert (single_run.export / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_an_engine_beside_sharded_processes(
    material: Material, teacher: str, tmp_path: Path
) -> None:
    """No process gathers all weights; the processes have different numbers of held-out answers."""
    changes = {**UNEVEN, "max_steps": 4, "eval__prompts": 3, "rollouts__lag": 1}
    from tests.student_trainer.tiny import job

    single_engine_run, sharded_engine_run = (
        finish(new_run(tmp_path / name, job(material, teacher, **changes, **options)))
        for name, options in {"one": {}, "two": PAIR}.items()
    )
    assert_close(metrics_of(sharded_engine_run), metrics_of(single_engine_run))

"""The predicted time of a step: limits by hand, the table of machines, and the best split."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clients.cli.app import main
from clients.config.file import load_job
from clients.data.models.shape import shape_of
from clients.plan.machines import MACHINES, GpuFigures
from clients.plan.memory import Load
from clients.plan.memory_plan import load_of, with_changes
from clients.plan.step_time import best_split, sampling_seconds, step_time, update_seconds
from student_trainer.loop.efficiency import peak_flops
from tests.clients.plan.test_memory import QWEN_7B, ROOT

# A machine of round figures, which reaches all of its peaks.
ROUND = GpuFigures(1e12, 5e11, 1e12, 80, 1e11, 1e10, 1e10, 1.0, 1.0, 1.0, 0.0)
SHAPE = shape_of(QWEN_7B)
RECIPES = ("rl_maths_8gpu", "rl_search_8gpu")
# The published sizes of the students of both recipes.
STUDENTS = {
    "rl_maths_8gpu": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28},
    "rl_search_8gpu": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36},
}
HEADS = {
    "rl_maths_8gpu": {"num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936},
    "rl_search_8gpu": {
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
}


def recipe(name: str) -> tuple[Any, Any]:
    shape = shape_of(QWEN_7B | STUDENTS[name] | HEADS[name])
    return load_job(ROOT / "deploy" / "jobs" / f"{name}.toml", []).config, shape


def test_the_peaks_are_those_of_mfu() -> None:
    for name, machine in MACHINES.items():
        assert peak_flops(f"NVIDIA {name}", bf16=True) == machine.bf16
        assert peak_flops(f"NVIDIA {name}", bf16=False) == machine.float32


def test_an_update_takes_six_operations_a_weight_and_token() -> None:
    """With memory that costs nothing; recomputation adds a third of the layers' products."""
    machine = replace(ROUND, memory=1e30)
    load = Load(SHAPE, 1, False, True, False, 4096, 1)
    weights = SHAPE.layers * SHAPE.linear_weights
    attention = 2 * SHAPE.queries * SHAPE.layers
    seconds = update_seconds(load, machine, 4096, 4096, 1)
    expected = 4096 * (6 * (weights + SHAPE.table_weights) + 3 * attention) / 1e12
    assert seconds == pytest.approx(expected)
    recomputed = update_seconds(replace(load, checkpointing=True), machine, 4096, 4096, 1)
    assert recomputed - seconds == pytest.approx(4096 * (2 * weights + attention) / 1e12)


def test_one_answer_reads_all_weights_for_each_token() -> None:
    machine = replace(ROUND, bf16=1e30, memory=1e12)
    seconds = sampling_seconds(SHAPE, machine, 1, 1000, 1000, 2)
    weights = 2 * (SHAPE.layers * SHAPE.linear_weights + SHAPE.table_weights)
    cache = 2 * 2 * SHAPE.keys * SHAPE.layers * 500
    records = 24 * SHAPE.vocabulary
    assert seconds == pytest.approx(1000 * (weights + cache + records) / 1e12)
    # 64 answers share the reading of the weights.
    assert sampling_seconds(SHAPE, machine, 64, 1000, 1000, 2) < 4 * seconds


@pytest.mark.parametrize("name", RECIPES)
def test_no_split_of_a_recipe_is_faster_than_the_best(name: str) -> None:
    """And its prediction stands in the recipe, for the split that it has."""
    job, shape = recipe(name)
    machine = MACHINES["H100"]
    split = best_split(job, shape, machine, None)
    assert split is not None
    shares, best_time = split
    assert shares.trainer + shares.engines == job.gpus == 8
    for engines in range(1, 8):
        tables = {"train": {"processes": 8 - engines}, "rollouts": {"gpus": engines}}
        tried_job = with_changes(job, tables)
        time = step_time(tried_job, shape, load_of(tried_job, shape), machine)
        assert time.seconds >= best_time.seconds
        assert time.seconds == max(
            time.parts["rollouts"], time.parts["trainer"] + time.parts["push"]
        )
    time = step_time(job, shape, load_of(job, shape), machine)
    text = (ROOT / "deploy" / "jobs" / f"{name}.toml").read_text()
    assert f"# Predicted by `distill plan` for 8 H100: {time.seconds:.3g} s per step" in text
    division = f"best split {shares.trainer} + {shares.engines}: {best_time.seconds:.3g} s"
    assert division in " ".join(text.replace("#", " ").split())


def test_the_command_prints_seconds_bottleneck_and_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    file = str(ROOT / "deploy" / "jobs" / "rl_maths_8gpu.toml")
    arguments = ["plan", file, "--set", f"student.model={tmp_path}"]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "Predicted for H100" in output
    assert "the bottleneck is: " in output
    assert "Best split of the GPUs: " in output
    assert "The teacher is not counted" not in output
    teacher = ["--set", "teacher.address=localhost:1", "--set", "method.teacher_beta=0.1"]
    assert main([*arguments, *teacher]) == 0
    assert "The teacher is not counted" in capsys.readouterr().out
    seconds = []
    for machine in MACHINES:
        main(["--json", *arguments, "--machine", machine])
        step = json.loads(capsys.readouterr().out)["step"]
        assert step["best_split"]["seconds"] <= step["seconds"]
        assert step["bottleneck"] == max(step["parts"], key=step["parts"].__getitem__)
        seconds.append(step["seconds"])
    assert seconds == sorted(seconds, reverse=True)

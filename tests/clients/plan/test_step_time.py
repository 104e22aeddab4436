"""The predicted time of a step: limits by hand, the table of machines, and the best split."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.models.step_time_page import GUIDE, RECIPES, recipe, with_output, with_prediction
from benchmarks.shared.programs import JOBS
from clients.cli.app import main
from clients.config.file import load_job
from clients.config.tables.job import TrainingJob
from clients.data.models.shape import shape_of
from clients.plan.machines import MACHINES, MachineFigures
from clients.plan.memory import Load
from clients.plan.memory_plan import load_of, with_changes
from clients.plan.step_time import (
    SamplingLoad,
    StepTime,
    best_split,
    sampling_seconds,
    step_time,
    update_seconds,
)
from student_trainer.loop.efficiency import peak_flops
from tests.clients.plan.test_memory import QWEN_7B, ROOT

# A machine of round figures, which reaches all of its peaks, except in attention.
ROUND = MachineFigures(
    1e12, 5e11, 1e12, 80, 1e11, 1e10, 1e10, 0.5, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0
)
SHAPE = shape_of(QWEN_7B)


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
    # Attention reaches half of the peak, and its backward pass computes the scores again.
    expected = 4096 * (6 * (weights + SHAPE.table_weights) + 2 * 3.5 * attention) / 1e12
    assert seconds == pytest.approx(expected)
    recomputed = update_seconds(replace(load, checkpointing=True), machine, 4096, 4096, 1)
    assert recomputed - seconds == pytest.approx(4096 * 2 * (weights + attention) / 1e12)


def test_one_answer_reads_all_weights_for_each_token() -> None:
    machine = replace(ROUND, bf16=1e30, memory=1e12)
    one = SamplingLoad(SHAPE, 1, 1000, 1000, 2, draws=0, batch=1, vllm=True)
    seconds = sampling_seconds(one, machine)
    weights = 2 * (SHAPE.layers * SHAPE.linear_weights + SHAPE.table_weights)
    cache = 2 * 2 * SHAPE.keys * SHAPE.layers * 500
    records = 88 * SHAPE.vocabulary
    assert seconds == pytest.approx(1000 * (weights + cache + records) / 1e12)
    # 64 answers share the reading of the weights.
    assert sampling_seconds(replace(one, answers=64, batch=64), machine) < 4 * seconds
    # transformers copies the cache and launches each layer; a CPU overlaps nothing.
    slow_host = replace(machine, layer_launch=1.0, token_launch=2.0)
    launches = 1000 * (SHAPE.layers + 2)
    hugging_face = sampling_seconds(replace(one, vllm=False), slow_host)
    assert hugging_face == pytest.approx(launches + 1000 * records / 1e12)
    serial = sampling_seconds(replace(one, vllm=False), replace(slow_host, overlaps=False))
    assert serial == pytest.approx(launches + seconds + 1000 * 4 * cache / 1e12)


@pytest.mark.parametrize(("lag", "seconds"), [(0, 10 + 1 + 4 + 0.5), (1, 10 + 1), (2, 10)], ids=str)
def test_the_lag_hides_parts(lag: int, seconds: float) -> None:
    """The teacher answers in two batches; the trainer waits for the first batch."""
    parts = {"rollouts": 10.0, "teacher": 2.0, "trainer": 4.0, "push": 0.5}
    time = StepTime(parts, lag, batches=2)
    assert time.seconds == seconds
    assert time.bottleneck == "rollouts"


@pytest.mark.parametrize("name", RECIPES)
def test_no_split_of_a_recipe_is_faster_than_the_best(name: str) -> None:
    job, shape = recipe(name), RECIPES[name]
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


@pytest.mark.parametrize(
    ("engine", "model_type", "gpus", "possible"),
    [
        ("vllm", "llama", 8, {2, 4, 8, 16}),  # one GPU cannot hold 141 GB
        ("vllm", "mixtral", 4, {4}),  # of unknown sizes
        ("hf", "qwen2", None, {1}),
    ],
)
@pytest.mark.parametrize("others", [(8, 8), (5, 3), (8, 0)], ids=str)
def test_a_split_has_a_number_of_gpus_that_can_run_the_teacher(
    engine: str,
    model_type: str,
    gpus: int | None,
    possible: set[int],
    others: tuple[int, int],
    tmp_path: Path,
) -> None:
    llama_70b = {
        "model_type": model_type, "num_hidden_layers": 80, "hidden_size": 8192,
        "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
        "vocab_size": 128256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(llama_70b))
    processes, engine_gpus = others
    overrides = [f"teacher.model={tmp_path}", f"teacher.engine={engine}"]
    overrides += [f"teacher.gpus={gpus}"] if gpus else []
    overrides += ["train.sharding=fsdp2", f"train.processes={processes}"]
    if engine_gpus:
        overrides += ["rollouts.engine=vllm", f"rollouts.gpus={engine_gpus}"]
    job = load_job(JOBS / "gsm8k_on_policy.toml", overrides).config
    assert isinstance(job, TrainingJob)
    split = best_split(job, SHAPE, MACHINES["H100"], None)
    assert split is not None
    assert split[0].teacher in possible
    assert split[0].trainer + split[0].engines + split[0].teacher == sum(others) + (gpus or 1)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_its_prediction(name: str) -> None:
    text = (JOBS / f"{name}.toml").read_text()
    assert with_prediction(text, name) == text


def test_the_guide_has_the_output_of_the_plan() -> None:
    assert with_output(GUIDE.read_text()) == GUIDE.read_text()


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

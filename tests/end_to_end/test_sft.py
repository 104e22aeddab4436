"""Supervised fine-tuning by real trainers: the loss falls, runs resume, processes share work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clients.preflight.limits import read_limits
from clients.runs.directory import RunDirectory
from tests.end_to_end.conftest import Once
from tests.end_to_end.forked_trainer import finish, trainer
from tests.end_to_end.processes import ENVIRONMENT, metrics_of, new_run, weights
from tests.end_to_end.test_two_processes import assert_close

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

EXAMPLES = Path(__file__).parents[2] / "examples"
# 7 sequences per step in small micro-batches, so that the processes have different numbers.
PAIR = {"max_steps": 6, "train__prompts_per_step": 7, "eval__every": 3, "eval__prompts": 5}


def make_job(material: Material, **changes: Any) -> Any:
    from tests.student_trainer.tiny import sft_job

    return sft_job(material, **{"max_steps": 40, **changes})


@pytest.fixture(scope="session")
def mixed_data(material: Material, once: Once) -> dict[str, Any]:
    """Options for weighted records and a second data set with a quarter of each step."""

    def write_data(path: Path) -> None:
        path.mkdir()
        lines = [json.loads(line) for line in material.prompts.read_text().splitlines()]
        for name, selected_lines in (("first", lines[:100]), ("second", lines[100:120])):
            records = [{**record, "weight": 0.5 + n % 2} for n, record in enumerate(selected_lines)]
            text = "".join(json.dumps(record) + "\n" for record in records)
            (path / f"{name}.jsonl").write_text(text)

    path = once("mixed-data", write_data)
    return {
        "data__path": str(path / "first.jsonl"),
        "data__mix": [{"path": str(path / "second.jsonl"), "share": 0.25}],
        "data__weight_column": "weight",
    }


@pytest.fixture(scope="session")
def undisturbed(material: Material, mixed_data: dict[str, Any], once: Once) -> RunDirectory:
    config = make_job(material, **mixed_data)
    return RunDirectory(once("sft", lambda path: finish(new_run(path, config))))


@pytest.fixture(scope="session")
def single_run(material: Material, mixed_data: dict[str, Any], once: Once) -> RunDirectory:
    """The run in one process that two processes must equal."""
    config = make_job(material, **mixed_data, **PAIR)
    return RunDirectory(once("sft-alone", lambda path: finish(new_run(path, config))))


def test_the_held_out_loss_falls(undisturbed: RunDirectory) -> None:
    lines = metrics_of(undisturbed)
    assert (lines[0]["step"], lines[-1]["step"]) == (0, 40)
    assert lines[-1]["eval/cross_entropy"] < 0.5 * lines[0]["eval/cross_entropy"]


def test_killed_and_resumed(
    material: Material, mixed_data: dict[str, Any], undisturbed: RunDirectory, tmp_path: Path
) -> None:
    """Killed in the third epoch of the small data set and the fourth of the other one.

    The job has 2.6 epochs of 123 records in place of the 40 steps.
    """
    from tests.student_trainer.tiny import curve

    config = make_job(material, **mixed_data).model_copy(update={"max_steps": 0, "epochs": 2.6})
    run = new_run(tmp_path / "run", config)
    for attempt, step in ((1, 10), (2, 31)):
        with trainer(run, attempt) as process:
            process.wait_for_step(step)
            process.kill()
    finish(run, 3)
    assert ("max_steps", 40) in read_limits(run.path).values.items()
    assert curve(metrics_of(run)) == curve(metrics_of(undisturbed))
    assert weights(run) == weights(undisturbed)


@pytest.mark.parametrize("sharding", ["none", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_two_processes(
    material: Material,
    mixed_data: dict[str, Any],
    single_run: RunDirectory,
    tmp_path: Path,
    sharding: str,
) -> None:
    changes = {"train__processes": 2, "train__sharding": sharding}
    run = finish(new_run(tmp_path / "run", make_job(material, **mixed_data, **PAIR, **changes)))
    assert_close(metrics_of(run), metrics_of(single_run))


@pytest.mark.slow
def test_the_example(tmp_path: Path) -> None:
    """`distill run` on examples/sft.toml, with a small student in place of the one it names."""
    from tests.student_trainer import tiny

    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}{# enable_thinking #}"
    )
    characters = template + (EXAMPLES / "conversations.jsonl").read_text()
    tokenizer = tiny.tokenizer(characters)
    tokenizer.chat_template = template
    student = tiny.save(
        tiny.model(seed=3, spread=0.2, characters=characters), tokenizer, tmp_path / "student"
    )
    settings = [f"student.model={student}", "train.learning_rate=3e-3", "track.tensorboard=false"]
    command = [sys.executable, "-m", "clients", "run", "examples/sft.toml", "--runs", str(tmp_path)]
    process = subprocess.run(
        command + [word for setting in settings for word in ("--set", setting)],
        capture_output=True,
        text=True,
        cwd=EXAMPLES.parent,
        env=ENVIRONMENT,
    )
    assert process.returncode == 0, process.stderr
    (path,) = tmp_path.glob("sft-*")
    run = RunDirectory(path)
    held_out = [
        line["eval/cross_entropy"] for line in metrics_of(run) if "eval/cross_entropy" in line
    ]
    assert len(held_out) == 4
    assert held_out[-1] < 0.7 * held_out[0]
    assert (run.export / "chat_template.jinja").read_text() == template

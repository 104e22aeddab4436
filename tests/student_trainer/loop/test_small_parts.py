"""Schedules, progress, answers, preflight."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest

from clients.config.tables.common import TrainConfig
from clients.data.tokens.tokenizer import first_difference
from clients.preflight.files import check_models, check_processes
from clients.runs import progress as progress_module
from clients.runs.directory import Control, RunDirectory
from clients.runs.metrics_file import Point
from clients.runs.progress import Progress
from protos.errors import Corrupt, InvalidInput
from student_trainer.loop.optimizer import learning_rate, warn_of_schedule
from student_trainer.loop.watches import LearningWatch
from student_trainer.rewards.sample import exact_match
from student_trainer.run.model_checks import check_hub
from tests.student_trainer import tiny


def rates(schedule: Any, warmup: int, steps: int) -> list[float]:
    train = TrainConfig(learning_rate=2.0, schedule=schedule, warmup_steps=warmup)
    return [learning_rate(train, step, steps) for step in range(1, steps + 1)]


def test_schedules_by_hand() -> None:
    assert rates("constant", 0, 4) == [2, 2, 2, 2]
    assert rates("constant", 4, 6) == [0.5, 1, 1.5, 2, 2, 2]
    assert rates("linear", 0, 4) == [2, 1.5, 1, 0.5]
    assert rates("linear", 2, 6) == [1, 2, 2, 1.5, 1, 0.5]
    assert rates("cosine", 0, 4) == pytest.approx([2, 1 + math.sqrt(0.5), 1, 1 - math.sqrt(0.5)])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (5, 20), (20, 20), (50, 20)])
def test_schedules_never_leave_their_range(schedule: str, warmup: int, steps: int) -> None:
    all_rates = rates(schedule, warmup, steps)
    assert all(0 < rate <= 2 for rate in all_rates)
    top = min(warmup, steps)
    assert all_rates[:top] == sorted(all_rates[:top])
    assert all_rates[top:] == sorted(all_rates[top:], reverse=True)


def test_a_warm_up_that_never_ends(caplog: pytest.LogCaptureFixture) -> None:
    train = TrainConfig(learning_rate=2.0, warmup_steps=8)
    warn_of_schedule(train, 8, None)
    assert not caplog.messages
    warn_of_schedule(train, 4, None)
    assert caplog.messages == [
        "train.warmup_steps = 8 is longer than the run of 4 steps: the learning rate ends at 1,"
        " not at 2"
    ]


def test_a_resumed_run_with_another_schedule(caplog: pytest.LogCaptureFixture) -> None:
    """With 4 steps a linear schedule is at 0.5 in the last one; with 8 it goes on at 1."""
    train = TrainConfig(learning_rate=2.0, schedule="linear")
    for steps in (4, 8):
        warn_of_schedule(train, steps, Point(4, {"lr": 0.5}))
    warn_of_schedule(train, 4, Point(2, {"lr": 1.5}))
    assert caplog.messages == [
        "the schedule has changed: the learning rate of step 5 is 1, that of step 4 was 0.5"
    ]


@pytest.mark.parametrize(
    ("metrics", "note", "warning"),
    [
        ({"length/truncated": 1.0, "grad_norm": 1.0}, "100% of answers cut", "are cut at method"),
        ({"length/truncated": 0.1, "grad_norm": 1.0}, "", ""),
        ({"grad_norm": 0.0}, "nothing learned: zero gradients", "the gradients of 5 steps"),
    ],
)
def test_a_run_that_does_not_learn_says_so_once(
    material: tiny.Material,
    metrics: dict[str, float],
    note: str,
    warning: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = LearningWatch(tiny.job(material))
    for step in range(1, 5):
        watch.see(step, metrics)
    assert (watch.note, caplog.messages) == ("", [])
    for step in range(5, 9):
        watch.see(step, metrics)
    assert watch.note == note
    assert len(caplog.messages) == bool(warning)
    assert all(warning in message for message in caplog.messages)
    for step in range(9, 14):
        watch.see(step, {"length/truncated": 0.0, "grad_norm": 1.0})
    assert watch.note == ""


@pytest.fixture
def run(tmp_path: Path, material: tiny.Material) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", tiny.job(material))


def make_progress(run: RunDirectory, **changes: Any) -> Progress:
    options = {"attempt": 2, "max_steps": 9, "main": True, "terminated": lambda: False}
    return Progress(run, **{**options, **changes})


def test_progress_is_told(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now)
    progress = make_progress(run)
    seen_statuses = []
    for phase, step, wait in (
        ("preflight", 0, 0), ("training", 1, 0), ("training", 2, 0.1), ("training", 3, 0.5),
        ("saving", 3, 0), ("training", 4, 0.1),
    ):  # fmt: skip
        now += wait
        progress.say(phase, step)
        status = run.read_status()
        assert status is not None
        seen_statuses.append((status.phase, status.step))
    assert seen_statuses == [
        ("preflight", 0), ("training", 1), ("training", 1), ("training", 3),
        ("saving", 3), ("training", 4),
    ]  # fmt: skip
    progress.say("training", 5)
    progress.end("failed", error=Corrupt("no reason", field="data.path", hint="none"))
    status = run.read_status()
    assert status is not None
    assert (status.attempt, status.verdict, status.step, status.max_steps) == (2, "failed", 5, 9)
    assert status.reason == "data.path: no reason; none"
    assert (status.code, status.field) == ("DATA_LOSS", "data.path")


def test_wishes_to_stop(run: RunDirectory) -> None:
    assert make_progress(run).stop_wanted() == ""
    assert make_progress(run, terminated=lambda: True).stop_wanted() == "checkpoint"
    run.write_control(Control("now"))
    assert make_progress(run, terminated=lambda: True).stop_wanted() == "now"
    # Other processes do not read the file; they follow the main process.
    assert make_progress(run, main=False).stop_wanted() == ""
    assert make_progress(run, main=False, agree=lambda wish: max(wish, 2)).stop_wanted() == "now"


def test_only_the_main_process_tells(run: RunDirectory) -> None:
    progress = make_progress(run, main=False)
    progress.say("training", 1)
    progress.end("cancelled")
    assert run.read_status() is None


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("42", "42", True),
        (" 42\n", "42", True),
        ("4 2", "42", False),
        ("so it is #### 1,042", "1042", True),
        ("#### 1 #### 2", "2", True),
        ("#### 1 #### 2", "1", False),
        ("", "", True),
        ("", "1", False),
    ],
)
def test_answers(answer: str, reference: str, right: bool) -> None:
    assert exact_match(answer, reference) is right


@pytest.mark.parametrize(
    ("teacher", "student", "says"),
    [
        (["a", "b"], ["a", "c"], "id 1 is 'c' to the student and 'b' to the teacher"),
        (["a", "b"], ["b", "a"], "id 0 is 'b' to the student and 'a' to the teacher"),
        (["a"], ["a", "b"], "the student has 2 tokens, the teacher 1"),
        (["a", "b"], ["a"], "the student has 1 tokens, the teacher 2"),
    ],
)
def test_the_first_difference(teacher: list[str], student: list[str], says: str) -> None:
    assert first_difference(teacher, student) == f"the tokenizers differ: {says}"


def test_a_hub_that_is_away_is_not_asked_again(
    material: tiny.Material, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    check_hub(tiny.job(material))
    assert os.environ["HF_HUB_OFFLINE"] == "0"
    with caplog.at_level(logging.WARNING):
        check_hub(tiny.job(material, student__model="someone/model"))
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert "using the local cache only" in caplog.text


def test_student_directories(material: tiny.Material, tmp_path: Path) -> None:
    check_models(tiny.job(material))
    check_models(tiny.job(material, student__model="someone/model"))
    with pytest.raises(InvalidInput, match=r"no config\.json") as caught:
        check_models(tiny.job(material, student__model=str(tmp_path)))
    assert caught.value.field == "student.model"


@pytest.mark.parametrize("field", ["train.prompts_per_step", "eval.prompts"])
def test_every_process_has_work(material: tiny.Material, field: str) -> None:
    enough: dict[str, Any] = {"train__processes": 3, field.replace(".", "__"): 3}
    check_processes(tiny.job(material, **enough))
    with pytest.raises(InvalidInput) as caught:
        check_processes(tiny.job(material, **{**enough, "train__processes": 4}))
    assert caught.value.field == field

"""metrics.jsonl: one line per step, also after a resume or a crash."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest

from clients.config.tables.common import TrackConfig
from clients.runs.directory import RunDirectory
from student_trainer.run.metrics import open_metrics
from tests.student_trainer import tiny

FILE_ONLY = TrackConfig(tensorboard=False)


@pytest.fixture
def run(tmp_path: Path, material: tiny.Material) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", tiny.job(material))


def read_lines(run: RunDirectory) -> list[tuple[int, int]]:
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [(line["attempt"], line["step"]) for line in records]


def log_steps(run: RunDirectory, attempt: int, last: int | None, steps: range) -> None:
    log = open_metrics(run, attempt=attempt, last_step=last, track=FILE_ONLY)
    for step in steps:
        log.write(step, {"loss": step / 2})
    log.close()


def test_a_resume_forgets_what_comes_again(run: RunDirectory) -> None:
    log_steps(run, 1, None, range(6))
    log_steps(run, 2, 3, range(4, 8))
    assert read_lines(run) == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 4), (2, 5), (2, 6), (2, 7)]
    log_steps(run, 3, 7, range(8, 9))
    assert read_lines(run)[-2:] == [(2, 7), (3, 8)]
    log_steps(run, 4, None, range(2))
    assert read_lines(run) == [(4, 0), (4, 1)]


@pytest.mark.parametrize("torn", ['{"attempt": 1, "st', '{"attempt": 1, "step": 3, "loss": 1}'])
def test_a_torn_last_line_is_dropped(run: RunDirectory, torn: str) -> None:
    log_steps(run, 1, None, range(3))
    with run.metrics.open("a") as file:
        file.write(torn)
    log_steps(run, 2, 2, range(3, 4))
    assert read_lines(run) == [(1, 0), (1, 1), (1, 2), (2, 3)]


def test_a_line_can_be_read_as_soon_as_it_is_written(run: RunDirectory) -> None:
    log = open_metrics(run, attempt=1, last_step=None, track=FILE_ONLY)
    log.write(1, {"loss": 0.1})
    assert json.loads(run.metrics.read_text()) == {"attempt": 1, "step": 1, "loss": 0.1}
    log.close()


def test_numbers_keep_every_bit(run: RunDirectory) -> None:
    log = open_metrics(run, attempt=1, last_step=None, track=FILE_ONLY)
    log.write(1, {"loss": 1 / 3})
    log.close()
    assert json.loads(run.metrics.read_text())["loss"] == 1 / 3


def test_numbers_that_are_none_are_told_and_left_out(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    log = open_metrics(run, attempt=1, last_step=None, track=FILE_ONLY)
    with caplog.at_level(logging.WARNING):
        finite_metrics = log.write(4, {"loss": math.nan, "grad_norm": math.inf, "lr": 0.5})
    log.close()
    assert finite_metrics == {"lr": 0.5}
    assert json.loads(run.metrics.read_text()) == {"attempt": 1, "step": 4, "lr": 0.5}
    assert sorted(record.getMessage() for record in caplog.records) == [
        "step 4: grad_norm is inf and was not written",
        "step 4: loss is nan and was not written",
    ]


def test_tensorboard_shows_each_step_once(run: RunDirectory) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for attempt, last, steps in ((1, None, range(6)), (2, 3, range(4, 7))):
        log = open_metrics(run, attempt=attempt, last_step=last, track=TrackConfig())
        for step in steps:
            log.write(step, {"loss": attempt})
        log.close()
    board = EventAccumulator(str(run.tensorboard))
    board.Reload()
    events = [(event.step, event.value) for event in board.Scalars("loss")]
    assert events == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]

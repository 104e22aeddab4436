"""metrics.jsonl of short and long runs: written, resumed, and read in parts."""

from __future__ import annotations

import json
import logging
import tracemalloc
from pathlib import Path

import pytest

from clients.runs.best_step import best_step
from clients.runs.directory import RunDirectory
from clients.runs.metrics_file import (
    MetricsLog,
    Point,
    read_curves,
    read_evaluations,
    read_points,
)
from tests.distill_server.conftest import job_config

EVERY = 100


def line_of(step: int) -> str:
    values = {"loss": 1 / (step + 1)}
    evaluation = {"eval/kl": abs(step - 700) / 7} if step % EVERY == 0 else {}
    return json.dumps({"attempt": 1, "step": step, **values, **evaluation}) + "\n"


def write(path: Path, steps: int) -> Path:
    with path.open("w") as file:
        file.writelines(line_of(step) for step in range(steps + 1))
    return path


def test_curves_of_a_short_run_have_all_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "metrics.jsonl", 60)
    assert read_curves(path) == list(read_points(path))
    assert [point.step for point in read_curves(path)] == list(range(61))
    assert read_curves(tmp_path / "none") == []
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("steps", "most"),
    [(7_013, 64), pytest.param(1_000_000, 10_000, marks=pytest.mark.slow)],
    ids=["long", "a million"],
)
def test_curves_of_a_long_run(steps: int, most: int, tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", steps)
    size = path.stat().st_size
    tracemalloc.start()
    points = read_curves(path, most)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    interval = 1
    while sum(step % EVERY != 0 for step in range(0, steps + 1, interval)) > most:
        interval *= 2
    expected = {*range(0, steps + 1, interval), *range(0, steps + 1, EVERY), steps}
    assert [point.step for point in points] == sorted(expected)
    assert points[-1] == Point(steps, {"loss": 1 / (steps + 1)} | points[-1].metrics)
    if steps == 1_000_000:
        assert peak < size / 2, "the lines of other steps are not held"


def test_the_log_knows_its_evaluations_and_its_last_step(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", job_config())
    log = MetricsLog(run, attempt=1, last_step=None)
    for step in range(1003):
        log.write(step, json.loads(line_of(step)))
    log.close()
    resumed = MetricsLog(run, attempt=2, last_step=950)
    expected = list(read_evaluations(run.metrics))
    assert [point.step for point in expected] == list(range(0, 950, EVERY))
    assert (resumed.evaluations, resumed.last and resumed.last.step) == (expected, 950)
    resumed.write(951, {"loss": 1.0})
    resumed.write(952, {"loss": 1.0, "eval/kl": 0.5})
    resumed.close()
    expected = list(read_evaluations(run.metrics))
    assert (resumed.evaluations, resumed.last) == (expected, expected[-1])
    points = list(read_points(run.metrics))
    assert [point.step for point in points] == list(range(953))
    for steps in ([600, 952], [100, 200], [601]):
        assert best_step(expected, steps) == best_step(points, steps)


def test_a_resumed_log_removes_damaged_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDirectory.create(tmp_path / "run", job_config())
    damaged = ['{"attempt": 1, "step": 2, "lo\n', "\0\0\n", "[1]\n", '{"attempt": 1, "step": 4']
    flipped_bit = line_of(2).encode().replace(b"loss", b"\xecoss")
    run.metrics.write_text(line_of(1) + damaged[0] + damaged[1] + damaged[2])
    with run.metrics.open("ab") as file:
        file.write(flipped_bit + line_of(3).encode() + damaged[3].encode())
    with caplog.at_level(logging.WARNING):
        log = MetricsLog(run, attempt=2, last_step=9)
    assert caplog.messages == ["metrics.jsonl: removed a damaged line"] * 5
    assert run.metrics.read_text() == line_of(1) + line_of(3)
    assert log.last == Point(3, {"loss": 0.25})
    log.close()

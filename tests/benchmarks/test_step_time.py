"""The benchmark of the step-time model measures a job once, and compares its prediction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.models.calibration import mean_figures
from benchmarks.models.step_time import CASES, main
from benchmarks.models.step_time_page import format_page
from clients.plan.machines import MACHINES


def test_the_mean_of_two_calibrations_is_geometric() -> None:
    first, second = MACHINES["A100"], MACHINES["B200"]
    mean = mean_figures(first, second)
    assert mean.memory == pytest.approx((first.memory * second.memory) ** 0.5)
    assert mean.size == first.size


@pytest.mark.slow
def test_a_job_is_measured_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, case = tmp_path / "step_time.json", CASES[0]
    arguments = ["--only", case.name, "--steps", "3", "--out", str(out)]
    main(arguments)
    assert case.name in capsys.readouterr().out
    (run,) = json.loads(out.read_text())["runs"]
    assert run["measured"]["step"] > 0
    assert run["measured"]["cpu"] > 0
    assert run["predicted"] == pytest.approx(sum(run["parts"].values()))
    assert f"| {case.name} |" in format_page(json.loads(out.read_text()))
    main(arguments)
    assert capsys.readouterr().out == ""
    assert len(json.loads(out.read_text())["runs"]) == 1

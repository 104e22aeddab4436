"""The benchmarks of rollout engines run; a lag overlaps the stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.rollouts import ahead as rollouts_ahead
from benchmarks.rollouts import overlap

pytestmark = pytest.mark.slow


def test_stages_of_fixed_length_overlap(tmp_path: Path) -> None:
    out = tmp_path / "overlap.json"
    overlap.main(["--quick", "--out", str(out)])
    [shape] = json.loads(out.read_text())["shapes"]
    shares = shape["share_of_the_most"]
    assert shares["0"] < 0.6, "sampling and learning follow each other"
    assert shares["1"] > 1.2 * shares["0"], "on a machine with other work, too"


@pytest.mark.timeout(900)  # six jobs and services, a minute on an idle machine
def test_whole_jobs(tmp_path: Path) -> None:
    out = tmp_path / "ahead.json"
    rollouts_ahead.main(["--quick", "--out", str(out)])
    result = json.loads(out.read_text())
    ahead = {"lag 1", "lag 1 at once", "lag 2", "lag 2 at once"}
    assert result["seconds_a_step"].keys() == {"serial", "in turn"} | ahead
    assert all(comparison["times_serial"] > 0 for comparison in result["ahead"].values())

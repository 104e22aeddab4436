"""The benchmark of heads runs and compares each with the plain head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.loss import heads


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "heads.json"
    heads.main(["--quick", "--out", str(out)])
    result = json.loads(out.read_text())
    for side in ("student", "teacher"):
        assert tuple(result[side]) == heads.HEADS
        assert result[side]["plain"]["time_over_plain"] == 1
        assert result[side]["capped"]["seconds"] > 0
    assert "scaled and capped" in capsys.readouterr().out
    heads.main(["--quick", "--memory-of", "student", "capped"])
    assert float(capsys.readouterr().out) > -1  # MiB above inputs and gradients


def test_head_ids_are_distinct_and_no_padding() -> None:
    problem = heads.make_padded_problem(heads.QUICK)
    assert int(problem.head_ids.max()) < heads.QUICK.vocab - heads.PADDING
    assert all(len(set(row)) == len(row) for row in problem.head_ids.tolist())

"""A sharded anchor: the shards of several processes form the anchor of one, bit-identically."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.forks import Forks
from tests.student_trainer.teachers.anchor_process import (
    read_reports,
    run_process,
    run_processes,
    score_without_a_column,
)


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "anchor.safetensors")


def assert_same_anchor(anchor_path: Path, expected_path: Path) -> None:
    actual, expected_tensors = tensors(anchor_path), tensors(expected_path)
    assert actual.keys() == expected_tensors.keys()
    for name, value in expected_tensors.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=0)


@pytest.fixture(scope="module")
def single_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of one process."""
    return run_process(tmp_path_factory.mktemp("alone") / "out", "none", 5)


@pytest.fixture(scope="module")
def shared_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of four processes, each with a shard."""
    return run_processes(4, tmp_path_factory.mktemp("four") / "out", "fsdp2", 5)


def rows_by_number(out: Path) -> dict[str, Any]:
    return {number: rows for report in read_reports(out) for number, rows in report["rows"].items()}


def assert_same_words(anchor_path: Path, expected_path: Path, *, shares: bool) -> None:
    """Compare gap, version and rows of all processes with those of one."""
    (expected_report,), reports = (
        read_reports(expected_path.parent),
        read_reports(anchor_path.parent),
    )
    for process in reports:
        assert process["gap"] == pytest.approx(expected_report["gap"], rel=1e-12)
        assert process["version"] == expected_report["version"] == 2
    elements = [process["elements"] for process in reports]
    if shares:
        assert sum(elements) == expected_report["elements"]
        assert max(elements) < expected_report["elements"] * 1.2 / len(reports)
    else:
        assert elements == [expected_report["elements"]] * len(reports)
    actual_rows, expected_rows = (
        rows_by_number(anchor_path.parent),
        rows_by_number(expected_path.parent),
    )
    assert actual_rows.keys() == expected_rows.keys()
    for number, (head, tail) in expected_rows.items():
        np.testing.assert_allclose(actual_rows[number][0], head, rtol=0, atol=1e-6)
        np.testing.assert_allclose(actual_rows[number][1], tail, rtol=0, atol=1e-6)


def test_four_have_a_share_each(single_checkpoint: Path, shared_checkpoint: Path) -> None:
    assert_same_anchor(shared_checkpoint, single_checkpoint)
    assert_same_words(shared_checkpoint, single_checkpoint, shares=True)


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_two(single_checkpoint: Path, sharding: str, tmp_path: Path) -> None:
    checkpoint = run_processes(2, tmp_path / "out", sharding, 5)
    assert_same_anchor(checkpoint, single_checkpoint)
    assert_same_words(checkpoint, single_checkpoint, shares=sharding == "fsdp2")


def test_saved_by_four_resumed_by_two_and_by_one(shared_checkpoint: Path, tmp_path: Path) -> None:
    """The result is that of one process without a stop."""
    two_process_checkpoint = run_processes(2, tmp_path / "two", "fsdp2", 7, shared_checkpoint)
    one_process_checkpoint = run_process(tmp_path / "one", "none", 9, two_process_checkpoint)
    assert_same_anchor(one_process_checkpoint, run_process(tmp_path / "all", "none", 9))
    assert read_reports(one_process_checkpoint.parent)[0]["version"] == 4


def test_what_one_cannot_read_no_other_waits_for(tmp_path: Path) -> None:
    assert Forks(2, tmp_path / "group", score_without_a_column, tmp_path).wait() == [0, 0]
    first, second = read_reports(tmp_path)
    assert first == second
    assert "no column 'hint'" in first

"""An anchor in shares: what several processes have together is the anchor of one, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.forks import Forks
from tests.student_trainer.teachers.anchor_process import run, said, score_without_a_column, work


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "anchor.safetensors")


def assert_same_anchor(found: Path, expected: Path) -> None:
    ours, theirs = tensors(found), tensors(expected)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of one process."""
    return work(tmp_path_factory.mktemp("alone") / "out", "none", 5)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of four processes, each with its share."""
    return run(4, tmp_path_factory.mktemp("four") / "out", "fsdp2", 5)


def rows(out: Path) -> dict[str, Any]:
    return {number: rows for one in said(out) for number, rows in one["rows"].items()}


def assert_same_words(found: Path, expected: Path, *, shares: bool) -> None:
    """Gap, version and rows of all processes, against those of one."""
    (one,), each = said(expected.parent), said(found.parent)
    for process in each:
        assert process["gap"] == pytest.approx(one["gap"], rel=1e-12)
        assert process["version"] == one["version"] == 2
    elements = [process["elements"] for process in each]
    if shares:
        assert sum(elements) == one["elements"]
        assert max(elements) < one["elements"] * 1.2 / len(each)
    else:
        assert elements == [one["elements"]] * len(each)
    ours, theirs = rows(found.parent), rows(expected.parent)
    assert ours.keys() == theirs.keys()
    for number, (head, tail) in theirs.items():
        np.testing.assert_allclose(ours[number][0], head, rtol=0, atol=1e-6)
        np.testing.assert_allclose(ours[number][1], tail, rtol=0, atol=1e-6)


def test_four_have_a_share_each(alone: Path, four: Path) -> None:
    assert_same_anchor(four, alone)
    assert_same_words(four, alone, shares=True)


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_two(alone: Path, sharding: str, tmp_path: Path) -> None:
    found = run(2, tmp_path / "out", sharding, 5)
    assert_same_anchor(found, alone)
    assert_same_words(found, alone, shares=sharding == "fsdp2")


def test_saved_by_four_resumed_by_two_and_by_one(four: Path, tmp_path: Path) -> None:
    """As if one had gone all the way."""
    two = run(2, tmp_path / "two", "fsdp2", 7, four)
    one = work(tmp_path / "one", "none", 9, two)
    assert_same_anchor(one, work(tmp_path / "all", "none", 9))
    assert said(one.parent)[0]["version"] == 4


def test_what_one_cannot_read_no_other_waits_for(tmp_path: Path) -> None:
    assert Forks(2, tmp_path / "group", score_without_a_column, tmp_path).wait() == [0, 0]
    first, second = said(tmp_path)
    assert first == second
    assert "no column 'hint'" in first

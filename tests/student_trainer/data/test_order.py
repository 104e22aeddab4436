"""Orders in files, and the division of prompts compared with the definition of Webster's method."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from student_trainer.data import order
from student_trainer.data.order import assign_sets, count_per_set, permutation

SHARES = [
    ["1/2", "1/2"],
    ["7/10", "3/10"],
    ["97/100", "1/100", "1/100", "1/100"],
    ["1/3", "1/3", "1/3"],
    ["3/10", "1/10", "1/5", "3/20", "1/4"],
]


def assign_by_definition(shares: list[Fraction], total: int) -> list[int]:
    """Assign each prompt to the data set with the largest share / (2 count + 1)."""
    chosen: list[int] = []
    for _ in range(total):
        weights = [share / (2 * chosen.count(n) + 1) for n, share in enumerate(shares)]
        chosen.append(weights.index(max(weights)))
    return chosen


@pytest.mark.parametrize("share_texts", SHARES, ids=" ".join)
def test_shares(share_texts: list[str]) -> None:
    shares = [Fraction(share) for share in share_texts]
    assert sum(shares) == 1
    expected = assign_by_definition(shares, 300)
    assert assign_sets(shares, 0, 300) == expected
    for first in range(0, 280, 7):
        counts = [expected[:first].count(number) for number in range(len(shares))]
        assert count_per_set(shares, first) == counts
        assert assign_sets(shares, first, 20) == expected[first : first + 20]
        for share, count in zip(shares, counts, strict=True):
            assert abs(count - share * first) < len(shares) / 2 + 1


def test_a_late_step_costs_no_more() -> None:
    shares = [Fraction("0.7"), Fraction("0.3")]
    assert count_per_set(shares, 10**12) == [7 * 10**11, 3 * 10**11]


def draw(size: int, seed: int, epoch: int) -> list[int]:
    """Return the permutation as jobs have always drawn it, so that old checkpoints resume."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch + 1)
    indices: list[int] = torch.randperm(size, generator=generator).tolist()
    return indices


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Map permutations of every size, and forget those of other tests."""
    monkeypatch.setattr(order, "_MIN_MAPPED", 1)
    permutation.cache_clear()
    yield
    permutation.cache_clear()


def test_a_permutation_in_a_file_is_that_in_memory(small_files: None, tmp_path: Path) -> None:
    for size, seed, epoch in ((1, 0, 0), (300, 7, -1), (300, 7, 0), (70_000, 1, 3)):
        expected = draw(size, seed, epoch)
        assert permutation(size, seed, epoch).tolist() == expected
        for _ in range(2):
            permutation.cache_clear()
            mapped = permutation(size, seed, epoch, tmp_path)
            assert (type(mapped), mapped.tolist()) == (np.memmap, expected)
    permutation(300, 7, 1, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("order-1-0-0", "order-300-7--1", "order-300-7-1", "order-70000-1-3")
    }, "only one epoch is kept, and the held-out records"


def test_no_damage_gives_another_order(small_files: None, tmp_path: Path) -> None:
    expected = draw(50, 0, 0)
    permutation(50, 0, 0, tmp_path)
    [path] = tmp_path.iterdir()
    content = path.read_bytes()
    flipped = [content[:n] + bytes([content[n] ^ 4]) + content[n + 1 :] for n in range(204)]
    for damaged in (*flipped, b"", content[:100], content + b"\0", bytes(204)):
        path.write_bytes(damaged)
        permutation.cache_clear()
        assert permutation(50, 0, 0, tmp_path).tolist() == expected
        assert path.read_bytes() == content


def test_an_order_without_room_on_the_disk_is_in_memory(
    small_files: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(order, "reserve_space", refuse)
    assert permutation(50, 0, 0, tmp_path).tolist() == draw(50, 0, 0)
    assert not list(tmp_path.iterdir())
    assert permutation(50, 0, 1, tmp_path / "deleted").tolist() == draw(50, 0, 1)

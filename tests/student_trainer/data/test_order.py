"""Division of prompts among data sets, compared with the definition of Webster's method."""

from __future__ import annotations

from fractions import Fraction

import pytest

from student_trainer.data.order import assign_sets, count_per_set

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

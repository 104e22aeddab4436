"""EM and F1 as their papers define them."""

from __future__ import annotations

import pytest

from student_trainer.rewards.sample import f1, normalized, same_words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Beatles!", "beatles"),
        ("An apple, a pear & the thing", "apple pear thing"),
        ("U.S.A.", "usa"),
        ("theatre", "theatre"),
        ("the", ""),
        ("-5", "5"),
    ],
)
def test_normalisation_of_squad(text: str, expected: str) -> None:
    assert normalized(text) == expected


def test_exact_match_of_words() -> None:
    assert same_words("The Seine.", "seine")
    assert not same_words("Seine river", "Seine")


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        # precision 1/3, recall 1: 2 * 1/3 * 1 / (4/3)
        ("it is Paris", "Paris", 0.5),
        ("Paris", "the city of Paris", 0.5),
        ("Paris", "Rome", 0.0),
        ("", "Rome", 0.0),
        ("the", "a", 1.0),
        # words count as often as they are there: precision 2/3, recall 2/2
        ("new new york", "new york", 0.8),
    ],
)
def test_f1(answer: str, reference: str, expected: float) -> None:
    assert f1(answer, reference) == pytest.approx(expected)
    assert f1(reference, answer) == pytest.approx(expected)

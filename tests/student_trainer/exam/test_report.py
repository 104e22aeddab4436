"""The row of a model in the report, computed from rewards."""

from __future__ import annotations

import numpy as np
import pytest

from student_trainer.exam.answer_store import StoredAnswer
from student_trainer.exam.questions import Question
from student_trainer.exam.report import GradedAnswers, format_row, summarize, table_columns

NAN = np.nan
REWARD = np.array([[1, 0, 0, NAN], [1, 1, 0.5, 1], [0, 0, NAN, 0]])
VOTES = [["7", "8", "8", ""], ["9", "9", "1", "9"], ["", "", "", "3"]]


def grade_answers(reward: np.ndarray = REWARD) -> GradedAnswers:
    questions = [Question(number, "q", "r") for number in range(len(reward))]
    answers = [
        [StoredAnswer(p, n, "", 10 * p + n, n == 3) for n in range(4)] for p in range(len(reward))
    ]
    return GradedAnswers(questions, answers, reward, VOTES[: len(reward)])


def test_the_row_of_a_model() -> None:
    row = summarize("m", grade_answers(), None)
    assert (row["model"], row["prompts"], row["samples"], row["errors"]) == ("m", 3, 4, 2)
    means = {key: value["mean"] for key, value in row.items() if isinstance(value, dict)}
    assert means == pytest.approx(
        {
            "pass@1": (1 / 4 + 3 / 4 + 0) / 3,  # a reward of 0.5 or NaN does not count as correct
            "pass@2": (3 / 6 + 1 + 0) / 3,
            "pass@4": 2 / 3,
            "maj@4": (0 + 1 + 0) / 3,
            "reward": (1 / 4 + 3.5 / 4 + 0) / 3,
            "tokens": 11.5,
        }
    )
    assert row["truncated"] == 0.25
    assert "gain" not in row


def test_a_gain_is_paired() -> None:
    """Prompts differ far more than the two models: only paired differences show the gain."""
    hard = np.array([[1.0, 1, 1, 1], [0, 0, 0, 0]] * 12)
    better = hard.copy()
    better[1::2, 0] = 1
    first, second = (
        GradedAnswers(
            [Question(n, "q", "r") for n in range(24)],
            [[StoredAnswer(n, k, "", 1, False) for k in range(4)] for n in range(24)],
            reward,
            [[""] * 4] * 24,
        )
        for reward in (hard, better)
    )
    row = summarize("better", second, first)
    assert row["gain"]["mean"] == pytest.approx(0.125)
    assert row["gain"]["low"] > 0.05
    assert row["pass@1"]["low"] < summarize("first", first, None)["pass@1"]["mean"]


def test_what_a_person_reads() -> None:
    row = summarize("m", grade_answers(), None)
    cells = format_row(row, table_columns([row]))
    assert [*cells] == ["model", "pass@1", "pass@4", "maj@4", "tokens", "truncated", "errors"]
    assert cells["pass@1"].startswith("33.3 [")
    assert cells["tokens"].startswith("12 [")
    assert cells["truncated"] == "25.0"

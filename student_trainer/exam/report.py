"""Scores the answers of a model, saves them as a table, and computes the model's row of the report.

Each estimate is the mean of one value per prompt, which is computed from the answers to the prompt.
Its 95% interval comes from a bootstrap over prompts, or from Wilson's formula if the value of every
prompt is 0 or 1. In this module, [P, n] is the shape of values of n answers to each of P prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from student_trainer.exam.answer_store import StoredAnswer
from student_trainer.exam.questions import Question
from student_trainer.rewards import Rewards, RewardSample

_DRAWS = 2000
_LEVEL = 0.95
_Z = 1.959964  # the standard normal distribution has _LEVEL of its mass within +- _Z

# An answer is right if its reward is at least this. Rewards of user functions may have any value.
RIGHT = 1.0


@dataclass(frozen=True)
class Estimate:
    """The mean of a value over prompts, with the bounds of its 95% interval."""

    mean: float
    low: float
    high: float


def pass_at_k(right: NDArray[np.bool_], k: int) -> NDArray[np.float64]:
    """Return pass@k of each prompt, [P].

    pass@k is the probability that k of the prompt's n answers, drawn at random, include a right
    answer. With c right answers it is 1 - C(n - c, k) / C(n, k): the unbiased estimate of Chen et
    al. (arXiv 2107.03374). `right`: [P, n] bool, which answers are right. k is at least 1 and at
    most n.
    """
    n = right.shape[1]
    assert 1 <= k <= n, "k exceeds the number of answers"
    wrong = n - right.sum(1)
    # Without replacement, draw j is wrong again with chance (wrong - j) / (n - j).
    draw_index = np.arange(k)
    wrong_chances = np.clip(wrong[:, None] - draw_index, 0, None) / (n - draw_index)
    chances: NDArray[np.float64] = 1 - wrong_chances.prod(1)
    return chances


def majority(votes: Sequence[Sequence[str]], right: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return, for each prompt, whether the majority vote of its answers is right, as 0 or 1, [P].

    If several votes are equally frequent, the value is the mean over these votes. Empty votes are
    not counted. A prompt without any vote gets 0. `votes`: the vote of each answer. `right`: [P, n]
    bool, which answers are right.
    """
    return np.array(
        [_score_vote(*votes_and_right) for votes_and_right in zip(votes, right, strict=True)],
        np.float64,
    )


def estimate(values: NDArray[np.float64]) -> Estimate:
    """Return the mean of `values` [P], one per prompt, with its bootstrap interval.

    The same values always give the same interval.
    """
    generator = np.random.default_rng(0)
    means = [
        values[generator.integers(len(values), size=len(values))].mean() for _ in range(_DRAWS)
    ]
    low, high = np.quantile(means, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Estimate(float(values.mean()), float(low), float(high))


def estimate_share(values: NDArray[np.float64]) -> Estimate:
    """Return the mean of `values` [P], which are between 0 and 1, with its interval.

    If every value is 0 or 1, the interval is Wilson's (JASA 22, 1927). Its length is never 0,
    unlike that of a bootstrap: a bootstrap of 8 zeros would give [0, 0]. Otherwise the interval is
    that of `estimate`.
    """
    if not np.isin(values, (0.0, 1.0)).all():
        return estimate(values)
    n, mean = len(values), float(values.mean())
    center = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half_width = _Z * np.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2)) / (1 + _Z**2 / n)
    return Estimate(
        mean, max(float(center - half_width), 0.0), min(float(center + half_width), 1.0)
    )


def _score_vote(votes: Sequence[str], right: NDArray[np.bool_]) -> float:
    right_by_vote: dict[str, list[bool]] = defaultdict(list)
    for vote, is_right in zip(votes, right, strict=True):
        if vote:
            right_by_vote[vote].append(bool(is_right))
    highest_count = max(map(len, right_by_vote.values()), default=0)
    # Equal votes are usually scored alike, but a user's reward may score them differently.
    winning_scores = [
        float(np.mean(group)) for group in right_by_vote.values() if len(group) == highest_count
    ]
    return float(np.mean(winning_scores)) if winning_scores else 0.0


@dataclass(frozen=True, eq=False)
class GradedAnswers:
    """The scored answers of a model: n answers to each of P prompts.

    - questions: the P questions.
    - answers: the answers to each question; None if the model refused the prompt.
    - reward: [P, n] float64, the reward of each answer; NaN for an answer without reward.
    - votes: the vote of each answer in a majority vote; "" for no vote.
    """

    questions: Sequence[Question]
    answers: Sequence[Sequence[StoredAnswer | None]]
    reward: NDArray[np.float64]
    votes: Sequence[Sequence[str]]

    @property
    def right(self) -> NDArray[np.bool_]:
        """Which answers are right, [P, n] bool. Answers without a reward are not right."""
        return np.nan_to_num(self.reward) >= RIGHT

    def map_answers(self, function: Callable[[StoredAnswer], float]) -> NDArray[np.float64]:
        """Return the value of `function` for each answer, [P, n]; NaN for a refused prompt."""
        return np.array(
            [[np.nan if a is None else function(a) for a in row] for row in self.answers]
        )


def judge(
    questions: Sequence[Question],
    answers: Sequence[Sequence[StoredAnswer | None]],
    rewards: Rewards,
) -> GradedAnswers:
    """Score the answers.

    `answers[i]`: the answers to `questions[i]`. Every question has the same number of answers.
    """
    samples = [
        RewardSample(question.text, answer.text, question.reference, question.fields, answer.tokens)
        for question, question_answers in zip(questions, answers, strict=True)
        for answer in question_answers
        if answer is not None
    ]
    values, votes = iter(rewards(samples).values), iter(rewards.vote(samples))
    reward = [[np.nan if a is None else next(values) for a in row] for row in answers]
    vote_rows = [["" if a is None else next(votes) for a in row] for row in answers]
    return GradedAnswers(questions, answers, np.array(reward, np.float64), vote_rows)


def save(graded: GradedAnswers, file: Path) -> None:
    """Write all answers and their rewards to a Parquet file. Refused prompts are left out."""
    rows = [
        {
            "prompt": question.number,
            "sample": answer.sample,
            "question": question.text,
            "reference": question.reference,
            "text": answer.text,
            "tokens": answer.tokens,
            "truncated": answer.truncated,
            "vote": vote,
            "reward": None if np.isnan(reward) else float(reward),
        }
        for question, *columns in zip(
            graded.questions, graded.answers, graded.votes, graded.reward, strict=True
        )
        for answer, vote, reward in zip(*columns, strict=True)
        if answer is not None
    ]
    temporary_path = file.with_suffix(".tmp")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), temporary_path)
    temporary_path.replace(file)


def summarize(name: str, graded: GradedAnswers, baseline: GradedAnswers | None) -> dict[str, Any]:
    """Return the row of a model in the report.

    `baseline`: the scored answers of the first model to the same prompts; None for the first model
    itself. `gain` is pass@1 of the model minus pass@1 of the baseline. Shares are fractions between
    0 and 1, with 95% intervals over prompts.
    """
    right = graded.right
    samples = right.shape[1]
    tokens = graded.map_answers(lambda answer: answer.tokens)
    truncated = graded.map_answers(lambda answer: answer.truncated)
    has_answer = ~np.isnan(tokens)
    row: dict[str, Any] = {
        "model": name,
        "prompts": len(right),
        "samples": samples,
        **{
            f"pass@{k}": asdict(estimate_share(pass_at_k(right, k)))
            for k in sorted({*(1 << bit for bit in range(samples.bit_length())), samples})
        },
        f"maj@{samples}": asdict(estimate_share(majority(graded.votes, right))),
        "reward": asdict(estimate(np.nan_to_num(graded.reward).mean(1))),
        "tokens": asdict(estimate(np.nanmean(tokens[has_answer.any(1)], axis=1))),
        "truncated": float(np.nanmean(truncated)),
        "errors": int(np.isnan(graded.reward).sum()),
        "refused": int((~has_answer).sum()),
    }
    if baseline is not None:
        row["gain"] = asdict(estimate(pass_at_k(right, 1) - pass_at_k(baseline.right, 1)))
    return row


def format_row(row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, str]:
    """Return the cells of a row as texts: shares in percent, 95% intervals in brackets."""
    return {column: _format_cell(column, row.get(column, "")) for column in columns}


def table_columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the columns of the table. Includes only the first and the last pass@k."""
    names = [name for name in rows[0] if name.startswith("pass@")]
    gain = ["gain"] if len(rows) > 1 else []
    votes = [name for name in rows[0] if name.startswith("maj@") and name != "maj@1"]
    first_and_last = dict.fromkeys((names[0], names[-1]))
    return ["model", *first_and_last, *gain, *votes, "tokens", "truncated", "errors"]


def _format_cell(column: str, value: Any) -> str:
    match value:
        case {"mean": mean, "low": low, "high": high} if column == "tokens":
            return f"{mean:.0f} [{low:.0f}, {high:.0f}]"
        case {"mean": mean, "low": low, "high": high}:
            sign = "+" if column == "gain" else ""
            return f"{100 * mean:{sign}.1f} [{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"
        case float():
            return f"{100 * value:.1f}"
        case _:
            return str(value)

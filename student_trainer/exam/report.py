"""Scores the answers of a model, saves them as one table, and computes the row of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray

from student_trainer.exam.answer_store import StoredAnswer, write_parquet
from student_trainer.exam.questions import Question
from student_trainer.exam.scores import estimate, estimate_share, majority, pass_at_k
from student_trainer.rewards import Rewards, RewardSample

# An answer is right if its reward is at least this. Rewards of user functions may have any value.
RIGHT = 1.0


@dataclass(frozen=True, eq=False)
class GradedAnswers:
    """The scored answers to P prompts, n per prompt.

    answers: None for a refused prompt. reward: [P, n] float64, NaN if an answer has none. votes:
    the vote of each answer in a majority vote, "" for none.
    """

    questions: Sequence[Question]
    answers: Sequence[Sequence[StoredAnswer | None]]
    reward: NDArray[np.float64]
    votes: Sequence[Sequence[str]]

    @property
    def right(self) -> NDArray[np.bool_]:
        """Which answers are right, [P, n] bool. Refused or unscored answers are not right."""
        return np.nan_to_num(self.reward) >= RIGHT


def judge(
    questions: Sequence[Question],
    answers: Sequence[Sequence[StoredAnswer | None]],
    rewards: Rewards,
) -> GradedAnswers:
    """Score the answers. answers[i]: the answers to questions[i], the same number for each."""
    samples = [
        RewardSample(question.text, answer.text, question.reference, question.fields, answer.tokens)
        for question, question_answers in zip(questions, answers, strict=True)
        for answer in question_answers
        if answer is not None
    ]
    has_answer = np.array(
        [[answer is not None for answer in question_answers] for question_answers in answers]
    )
    rewards_of_answers = np.full(has_answer.shape, np.nan)
    rewards_of_answers[has_answer] = rewards(samples).values
    answer_votes = iter(rewards.vote(samples))
    votes = [
        ["" if answer is None else next(answer_votes) for answer in question_answers]
        for question_answers in answers
    ]
    return GradedAnswers(questions, answers, rewards_of_answers, votes)


def save(graded: GradedAnswers, file: Path) -> None:
    """Write every answer with its reward to a Parquet file; refused prompts are left out."""
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
        for question, question_answers, question_votes, question_rewards in zip(
            graded.questions, graded.answers, graded.votes, graded.reward, strict=True
        )
        for answer, vote, reward in zip(
            question_answers, question_votes, question_rewards, strict=True
        )
        if answer is not None
    ]
    write_parquet(pyarrow.Table.from_pylist(rows), file)


def summarize(name: str, graded: GradedAnswers, baseline: GradedAnswers | None) -> dict[str, Any]:
    """Return the row of a model in the report.

    `baseline`: the answers of the first model to the same prompts; `gain` is the difference of
    pass@1 to it. None for the first model itself. Shares are fractions, with 95% intervals over
    prompts.
    """
    right = graded.right
    sample_count = right.shape[1]
    given_answers = [
        [answer for answer in question_answers if answer is not None]
        for question_answers in graded.answers
    ]
    tokens = [
        np.mean([answer.tokens for answer in question_answers])
        for question_answers in given_answers
        if question_answers
    ]
    truncated_flags = [
        answer.truncated for question_answers in given_answers for answer in question_answers
    ]
    pass_estimates = {
        f"pass@{k}": asdict(estimate_share(pass_at_k(right, k))) for k in _list_ks(sample_count)
    }
    row: dict[str, Any] = {
        "model": name,
        "prompts": len(right),
        "samples": sample_count,
        **pass_estimates,
        f"maj@{sample_count}": asdict(estimate_share(majority(graded.votes, right))),
        "reward": asdict(estimate(np.nan_to_num(graded.reward).mean(1))),
        "tokens": asdict(estimate(np.array(tokens))),
        "truncated": float(np.mean(truncated_flags)),
        "errors": int(np.isnan(graded.reward).sum()),
        "refused": graded.reward.size - len(truncated_flags),
    }
    if baseline is not None:
        gain = pass_at_k(right, 1) - pass_at_k(baseline.right, 1)
        row["gain"] = asdict(estimate(gain))
    return row


def format_row(row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, str]:
    """Format a row for a table: shares in percent, 95% intervals in brackets."""
    return {column: _format_cell(column, row.get(column, "")) for column in columns}


def table_columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns of the table, with only the first and the last of the pass@k."""
    names = [name for name in rows[0] if name.startswith("pass@")]
    columns = ["model", *dict.fromkeys((names[0], names[-1]))]
    if len(rows) > 1:
        columns.append("gain")
    votes = [name for name in rows[0] if name.startswith("maj@") and name != "maj@1"]
    return [*columns, *votes, "tokens", "truncated", "errors"]


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


def _list_ks(n: int) -> list[int]:
    """Return 1, 2, 4, ... up to n, and n."""
    powers = [1 << bit for bit in range(n.bit_length()) if 1 << bit <= n]
    return sorted({*powers, n})

"""Scores of each judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clients.config.tables.reward import RewardConfig
from protos.errors import InvalidInput
from student_trainer.rewards.sample import RewardSample
from student_trainer.rewards.scorers import make_scorer

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "test.jsonl"


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        (r"so it is \boxed{\frac{1}{2}}", "0.5", True),
        (r"so it is \boxed{\frac{1}{2}}", r"\boxed{\frac{2}{4}}", True),
        ("12*2=24, then 24+48 #### 72", "6*12=72 #### 72", True),
        ("12*6=72, no: #### 71", "6*12=72 #### 72", False),
        ("#### 72\nThe other 3 are not sold.", "#### 72", True),
        ("#### 72 apples, and 3 are left", "#### 72", True),
        ("It is 72. #### 71\nNo, it is 72.", "#### 72", False),
        ("#### 71\nNo: #### 72", "#### 72", True),
        ("#### 72.", "#### 72", True),
        ("#### $1,072", "#### 1072", True),
        ("#### $72$", "#### 72", True),
        ("#### 72%", "0.72", True),
        ("#### 1/2", "0.5", True),
        (r"#### \frac{1}{2}", "0.5", True),
        (r"#### 2\sqrt{3}", "#### 2", False),
        ("#### (1,2)", "(2,1)", False),
        ("72 ####", "#### 72", False),
        ("The answer is 1000", "1,000", True),
        (r"\boxed{x^2+2x+1}", r"$(x+1)^2$", True),
        (r"\boxed{\{1,2\}}", r"\{2,1\}", True),
        (r"\boxed{(1,2)}", "(2,1)", False),
        (r"\frac{", "5", False),
        ("", "5", False),
    ],
)
def test_math_is_by_value(answer: str, reference: str, right: bool) -> None:
    assert (
        make_scorer(RewardConfig(type="math")).score(RewardSample("", answer, reference)) == right
    )


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("so 5 * 2 #### 1,000", "#### 1000", True),
        ("#### 72.", "#### 72", True),
        ("#### $72", "#### 72", True),
        ("#### -$3.50.", "#### -3.50", False),  # a sign before the dollar is text
        ("#### $-3.50.", "#### -3.50", True),
        ("#### 72\nI hope this helps.", "#### 72", True),
        ("#### 72 apples", "#### 72", False),
        ("#### 7.2", "#### 72", False),
        ("#### Dr. No.", "#### Dr. No", False),
        ("72 ####", "72", False),
    ],
)
def test_exact_match_is_of_the_final_answers(answer: str, reference: str, right: bool) -> None:
    sample = RewardSample("", answer, reference)
    assert make_scorer(RewardConfig(type="exact_match")).score(sample) == right


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.is_file(), reason="needs GSM8K beside the checkout (../shared)")
@pytest.mark.parametrize("kind", ["math", "exact_match"])
def test_the_solutions_of_gsm8k(kind: str) -> None:
    """1,319 solutions are right, also with text after them, and wrong with another number."""
    score = make_scorer(RewardConfig(type=kind)).score
    golds = [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()]
    assert len(golds) == 1319
    bodies = [gold.rsplit("####", 1)[0] for gold in golds]
    assert all(score(RewardSample("", gold, gold)) for gold in golds)
    after = "\nThe other 3 are left."
    assert all(score(RewardSample("", gold + after, gold)) for gold in golds)
    pairs = zip(bodies, golds, strict=True)
    assert not any(score(RewardSample("", f"{body}#### 987654", gold)) for body, gold in pairs)


def test_math_without_a_reference_is_no_wrong_answer() -> None:
    with pytest.raises(ValueError, match="is not a mathematical expression"):
        make_scorer(RewardConfig(type="math")).score(RewardSample("", "5", ""))


@pytest.mark.parametrize(
    ("pattern", "answer", "value"),
    [
        (r"answer: (\d+)", "answer: 4? no, answer: 3", 0),  # the last one counts
        (r"answer: (\d+)", "answer: 3? no, answer: 4", 1),
        (r"answer: (\d+)", "4", 0),
        (r"answer: \d+", "answer: 3", 1),  # without a group, only a match counts
        (r"a|(b)", "a", 0),
    ],
)
def test_regex(pattern: str, answer: str, value: float) -> None:
    scorer = make_scorer(RewardConfig(type="regex", pattern=pattern))
    assert scorer.score(RewardSample("", answer, "4")) == value


@pytest.mark.parametrize(
    ("answer", "reference", "value"),
    [
        ("The red house", "red house", 1.0),
        ("a red car", "red house", 0.5),  # precision 1/2, recall 1/2
        ("red", "the red, red house", 0.5),  # precision 1, recall 1/3
        ("", "red house", 0.0),
        ("blue", "red house", 0.0),
        ("the blue one? #### The Red House!", "red house", 1.0),
    ],
)
def test_words(answer: str, reference: str, value: float) -> None:
    sample = RewardSample("", answer, reference)
    assert make_scorer(RewardConfig(type="f1")).score(sample) == value
    assert make_scorer(RewardConfig(type="word_match")).score(sample) == float(value == 1)


def test_function_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("HALF = 0.5\n")
    file = tmp_path / "math.py"  # the library's own is still to be found
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from neighbour import HALF\n"
        "@dataclass\n"
        "class Mine:\n"
        "    value: float\n"
        "def reward(prompt, answer, reference, fields):\n"
        "    return HALF * len(answer) + (prompt == reference) + fields['bonus']\n"
    )
    scorer = make_scorer(RewardConfig(type="python", file=str(file)))
    assert scorer.score(RewardSample("p", "four", "p", {"bonus": 10})) == 13.0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1 / 0", "cannot be loaded: ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "cannot be loaded: SystemExit: 3"),
        ("def rewards(): ...", "has no function `reward`"),
    ],
)
def test_function_that_is_none(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(InvalidInput, match=r"^reward\.file: .*" + message):
        make_scorer(RewardConfig(type="python", file=str(tmp_path / "mine.py")))


@pytest.mark.parametrize(
    ("config", "answer", "vote"),
    [
        (RewardConfig(type="math"), r"so \boxed{\frac{1}{2}}", "0.5"),
        (RewardConfig(type="math"), "nothing", ""),
        (RewardConfig(type="math"), r"$x^2 + 1$", "x**2 + 1"),
        (RewardConfig(type="exact_match"), "1, so #### 2,000", "2000"),
        (RewardConfig(type="regex", pattern=r"is (\d+)"), "it is 3, it is 4!", "4"),
        (RewardConfig(type="regex", pattern=r"is (\d+)"), "4", ""),
        (RewardConfig(type="reasoning_gym:chain_sum"), "<answer> 12 </answer>.", "12"),
    ],
)
def test_what_an_answer_votes_for(config: RewardConfig, answer: str, vote: str) -> None:
    assert make_scorer(config).vote(RewardSample("", answer)) == vote

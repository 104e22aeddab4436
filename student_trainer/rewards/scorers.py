"""The types of rewards, as functions from an answer to a number. Does not import torch."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients.config.tables.reward import RewardConfig
from protos.errors import InvalidInput
from student_trainer.rewards.sample import (
    MARK,
    RewardSample,
    conclusion,
    exact_match,
    f1,
    final_answer,
    missing_package,
    normalized,
    same_words,
)


@dataclass(frozen=True)
class RewardScorer:
    """The two functions of a reward. Both may raise any exception.

    - score: returns the reward of an answer.
    - vote: returns the vote of an answer, "" for no vote. A majority vote counts equal votes.
    """

    score: Callable[[RewardSample], float]
    vote: Callable[[RewardSample], str] = lambda sample: final_answer(sample.text)


def make_scorer(config: RewardConfig) -> RewardScorer:
    """Return the scorer of the reward that `config` describes.

    Raises InvalidInput if a package is not installed, a task does not exist, or the user's file
    cannot be used. The check of the job file cannot find these errors.
    """
    match config.type:
        case "exact_match":
            return RewardScorer(lambda sample: float(exact_match(sample.text, sample.reference)))
        case "f1":
            return RewardScorer(
                lambda sample: f1(conclusion(sample.text), sample.reference), _normalized_conclusion
            )
        case "word_match":
            return RewardScorer(
                lambda sample: float(same_words(conclusion(sample.text), sample.reference)),
                _normalized_conclusion,
            )
        case "math":
            return _math_scorer()
        case "regex":
            assert config.pattern is not None, "RewardConfig requires a pattern"
            return _regex_scorer(config.pattern)
        case "python":
            assert config.file is not None, "RewardConfig requires a file"
            return _python_scorer(Path(config.file))
        case _:
            from student_trainer.rewards.reasoning_gym import Task

            assert config.task is not None, "RewardConfig allows no other type"
            task = Task(config.task, config.options)
            return RewardScorer(task.score, task.vote)


def _normalized_conclusion(sample: RewardSample) -> str:
    return normalized(conclusion(sample.text))


def _math_scorer() -> RewardScorer:
    try:
        from math_verify import parse, verify
    except ImportError:
        raise missing_package("math-verify", "math") from None
    # The trainer kills this process after its own time limit, so the library's limits are off, and
    # its warnings about that are hidden.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def expression(sample: RewardSample) -> list[Any]:
        # In a text with the mark, the final answer follows it; without it, the parser searches.
        text = _mark_as_latex(conclusion(sample.text)) if MARK in sample.text else sample.text
        expressions: list[Any] = parse(text, parsing_timeout=None)
        return expressions

    def score(sample: RewardSample) -> float:
        gold = parse(_mark_as_latex(conclusion(sample.reference)), parsing_timeout=None)
        if not gold:
            raise ValueError(f"the reference {sample.reference!r} is not a mathematical expression")
        return float(verify(gold, expression(sample), timeout_seconds=None))

    def vote(sample: RewardSample) -> str:
        expressions = expression(sample)
        if expressions and getattr(expressions[0], "is_real", False) and expressions[0].is_number:
            return f"{float(expressions[0]):.10g}"  # 1/2 and 0.5 are one vote
        return str(expressions[0]) if expressions else ""

    return RewardScorer(score, vote)


# A number, perhaps with `$` before it or words after it: `$1,000.`, `72 apples`; not `72%`, `1/2`.
_NUMBER = re.compile(
    r"\\?\$?\s*(-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)"
    r"(?=[.,;:]?\s+[A-Za-z]{3,}(?![\w(\\])|[^\w%]*$)"
)


def _mark_as_latex(bare: str) -> str:
    """Return an answer such as `1/2` or `72 apples` as LaTeX, because the parser needs LaTeX."""
    if number := _NUMBER.match(bare):
        return f"${number[1]}$"
    return bare if "$" in bare or "\\boxed" in bare else f"${bare}$"


def _regex_scorer(pattern: str) -> RewardScorer:
    compiled = re.compile(pattern)

    def last_match(text: str) -> re.Match[str] | None:
        *_, last = None, *compiled.finditer(text)
        return last

    def vote(sample: RewardSample) -> str:
        match = last_match(sample.text)
        return final_answer(match[compiled.groups] or "") if match else ""

    def score(sample: RewardSample) -> float:
        if not compiled.groups:
            return float(last_match(sample.text) is not None)
        match = last_match(sample.text)
        return float(
            match is not None and match[1] is not None and exact_match(match[1], sample.reference)
        )

    return RewardScorer(score, vote)


def _python_scorer(file: Path) -> RewardScorer:
    sys.path.insert(0, str(file.parent))  # as a script, the file may import its neighbours
    try:
        # A module name that nothing else has, because the file may be called math.py.
        spec = importlib.util.spec_from_file_location("_reward_of_the_user", file)
        if spec is None or spec.loader is None:
            raise ImportError("the file name does not end in .py")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise InvalidInput(
            f"{file} cannot be loaded: {type(error).__name__}: {error}",
            field="reward.file",
            hint="correct the file, which is imported as a Python module",
        ) from error
    reward: Any = getattr(module, "reward", None)
    if not callable(reward):
        raise InvalidInput(
            f"{file} has no function `reward`",
            field="reward.file",
            hint="define reward(prompt, answer, reference, fields) and return a number",
        )

    def score(sample: RewardSample) -> float:
        number = reward(
            prompt=sample.prompt,
            answer=sample.text,
            reference=sample.reference,
            fields=sample.fields,
        )
        return float(number)

    return RewardScorer(score)

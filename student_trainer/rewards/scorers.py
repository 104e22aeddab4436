"""The judges: each makes a number of an answer. Imports no torch."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients.config.reward import RewardConfig
from protos.errors import InvalidInput
from student_trainer.rewards.missing_package import missing
from student_trainer.rewards.sample import RewardSample, conclusion
from student_trainer.rewards.text_match import exact_match, f1, final_answer, normalized, same_words


@dataclass(frozen=True)
class Scorer:
    """`score`: what an answer is worth. `said`: what counts of it where answers vote, "" if
    nothing does. Both may raise anything.
    """

    score: Callable[[RewardSample], float]
    said: Callable[[RewardSample], str] = lambda sample: final_answer(sample.text)


def make_scorer(config: RewardConfig) -> Scorer:
    """Raises InvalidInput for what the job file cannot know: packages, tasks, the user's file."""
    match config.type:
        case "exact_match":
            return Scorer(lambda sample: float(exact_match(sample.text, sample.reference)))
        case "f1":
            return Scorer(lambda sample: f1(conclusion(sample.text), sample.reference), _words)
        case "word_match":
            return Scorer(
                lambda sample: float(same_words(conclusion(sample.text), sample.reference)), _words
            )
        case "math":
            return _math()
        case "regex":
            assert config.pattern is not None, "the configuration asks for it"
            return _regex(config.pattern)
        case "python":
            assert config.file is not None, "the configuration asks for it"
            return _function(Path(config.file))
        case _:
            from student_trainer.rewards.reasoning_gym import Task

            assert config.task is not None, "the configuration names no other type"
            task = Task(config.task, config.options)
            return Scorer(task.score, task.said)


def _words(sample: RewardSample) -> str:
    return normalized(conclusion(sample.text))


def _math() -> Scorer:
    try:
        from math_verify import parse, verify
    except ImportError:
        raise missing("math-verify", "math") from None
    # Who waits for this process ends it: alarms of the library's own would only hide that.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def score(sample: RewardSample) -> float:
        gold = parse(_marked(sample.reference), parsing_timeout=None)
        if not gold:
            raise ValueError(f"the reference {sample.reference!r} is no mathematics")
        return float(verify(gold, parse(sample.text, parsing_timeout=None), timeout_seconds=None))

    def said(sample: RewardSample) -> str:
        found = parse(sample.text, parsing_timeout=None)
        if found and getattr(found[0], "is_real", False) and found[0].is_number:
            return f"{float(found[0]):.10g}"  # 1/2 and 0.5 are one vote
        return str(found[0]) if found else ""

    return Scorer(score, said)


def _marked(reference: str) -> str:
    """A bare reference, as data sets have it (`1/2`, `... #### 72`), is no LaTeX without marks."""
    bare = conclusion(reference)
    return bare if "$" in bare or "\\boxed" in bare else f"${bare}$"


def _regex(pattern: str) -> Scorer:
    compiled = re.compile(pattern)

    def found(text: str) -> re.Match[str] | None:
        *_, last = None, *compiled.finditer(text)
        return last

    def said(sample: RewardSample) -> str:
        match = found(sample.text)
        return final_answer(match[compiled.groups] or "") if match else ""

    def score(sample: RewardSample) -> float:
        if not compiled.groups:
            return float(found(sample.text) is not None)
        match = found(sample.text)
        return float(
            match is not None and match[1] is not None and exact_match(match[1], sample.reference)
        )

    return Scorer(score, said)


def _function(file: Path) -> Scorer:
    sys.path.insert(0, str(file.parent))  # as for any script: its neighbours can be imported
    try:
        # Of a name that no module has: a file may be called math.py.
        spec = importlib.util.spec_from_file_location("_reward_of_the_user", file)
        if spec is None or spec.loader is None:
            raise ImportError("it does not end in .py")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise InvalidInput(
            f"{file} cannot be loaded: {type(error).__name__}: {error}", field="reward.file"
        ) from error
    reward: Any = getattr(module, "reward", None)
    if not callable(reward):
        raise InvalidInput(
            f"{file} has no function `reward`",
            field="reward.file",
            hint="define reward(prompt, answer, reference, fields) and return a number",
        )

    def score(sample: RewardSample) -> float:
        value = reward(
            prompt=sample.prompt,
            answer=sample.text,
            reference=sample.reference,
            fields=sample.fields,
        )
        return float(value)

    return Scorer(score)

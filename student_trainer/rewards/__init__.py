"""Rewards, which score answers. `make_rewards` builds the `Rewards` of a job. Without torch.

Rewards that only compare texts run in this process. All other rewards run in child processes
(`judge.py`), because a user's function, a regular expression or computer algebra may hang or crash.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import LifoQueue
from typing import Any, Literal

import numpy as np

from clients.config.tables.reward import HARMLESS, LengthPenalty, RewardConfig
from protos.operating_system import count_cores
from student_trainer.rewards.judge import Judge, ScoringFailed
from student_trainer.rewards.sample import RewardSample, Scores
from student_trainer.rewards.scorers import RewardScorer, make_scorer

__all__ = ["RewardSample", "Rewards", "Scores", "make_rewards"]

log = logging.getLogger(__name__)

_MAX_JUDGES = 8


class Rewards:
    """Scores several answers at once.

    A context manager that stops the child processes at its end.
    """

    def __init__(self, config: RewardConfig, judges: int) -> None:
        """Prepare the scoring, and check that the reward can be loaded.

        If the reward runs in child processes, the first of them is started for this check.
        `judges`: the maximum number of child processes. Raises InvalidInput if a package, a task or
        the user's file cannot be used.
        """
        self._length = config.length
        self._direct: RewardScorer | None = None
        self._idle: LifoQueue[Judge] = LifoQueue()
        self._judges: list[Judge] = []
        if config.type in HARMLESS:
            self._direct = make_scorer(config)
            return
        self._judges = [Judge(config) for _ in range(judges)]
        self._judges[-1].start()  # so that a reward that cannot be built fails at once
        for judge in self._judges:
            self._idle.put(judge)

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the child processes, and all processes that they have started."""
        for judge in self._judges:
            judge.close()

    def __call__(self, samples: Sequence[RewardSample]) -> Scores:
        """Return the scores of `samples`, in the same order.

        An answer that cannot be scored raises no error: its value is NaN, and its reason is in
        `faults`. One warning is logged for all such answers.
        """
        outcomes = self._evaluate_samples(samples, "score")
        values = np.array(
            [np.nan if isinstance(outcome, _Fault) else outcome for outcome in outcomes], np.float64
        )
        if self._length is not None:
            values -= [length_penalty(sample.tokens, self._length) for sample in samples]
        faults = tuple(str(outcome) for outcome in outcomes if isinstance(outcome, _Fault))
        if faults:
            log.warning(
                "%d of %d answers have no reward; first: %s", len(faults), len(samples), faults[0]
            )
        return Scores(values, faults)

    def vote(self, samples: Sequence[RewardSample]) -> list[str]:
        """Return the vote of each answer in a majority vote: its final answer, or "" if none."""
        return [
            "" if isinstance(outcome, _Fault) else outcome
            for outcome in self._evaluate_samples(samples, "vote")
        ]

    def _evaluate_samples(
        self, samples: Sequence[RewardSample], method: Literal["score", "vote"]
    ) -> list[Any]:
        """Return the reward or the vote of each sample; a _Fault if it could not be computed."""
        if self._direct is not None:
            return list(map(getattr(self._direct, method), samples))

        def evaluate(sample: RewardSample) -> Any:
            judge = self._idle.get()
            try:
                return getattr(judge, method)(sample)
            except ScoringFailed as error:
                return _Fault(str(error))
            finally:
                self._idle.put(judge)

        with ThreadPoolExecutor(len(self._judges), "judge") as pool:
            return list(pool.map(evaluate, samples))


class _Fault(str):
    """The reason why an answer was not scored."""


def make_rewards(config: RewardConfig, *, processes: int = 1) -> Rewards:
    """Return the rewards of a job, with at most one child process per core, and at most 8 in all.

    `processes`: the number of trainer processes that share the cores of this machine. Raises
    InvalidInput if a package, a task or the user's file cannot be used.
    """
    cores = count_cores() // processes
    return Rewards(config, min(max(cores, 1), _MAX_JUDGES))


def length_penalty(tokens: int, length: LengthPenalty) -> float:
    """Return the length penalty of an answer with `tokens` tokens (DAPO, arXiv 2503.14476, eq. 13).

    The penalty is 0 for at most `free_tokens` tokens, and `weight` for at least `max_tokens`
    tokens. Between them it grows linearly.
    """
    overlong_share = (tokens - length.free_tokens) / (length.max_tokens - length.free_tokens)
    return length.weight * min(max(overlong_share, 0.0), 1.0)

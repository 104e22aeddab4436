"""Rewards: scores for answers. `make_rewards` builds the `Rewards` of a job. Without torch.

Rewards that only match text run in this process. Every other reward runs in child processes
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
    """Scores several answers at once. A context manager; its end stops the child processes."""

    def __init__(self, config: RewardConfig, judges: int) -> None:
        """Start one child process, to check the reward. `judges`: maximum number of processes.

        Raises InvalidInput if a package, a task or the user's file cannot be used.
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
        """Kill the child processes, and the processes that they started."""
        for judge in self._judges:
            judge.close()

    def __call__(self, samples: Sequence[RewardSample]) -> Scores:
        """Score `samples`, in their order. Never raises for an answer that cannot be scored.

        Such an answer has the value NaN and its reason in `faults`; one warning is logged.
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
        """Return the vote of each answer in a majority vote: its final answer, or "" for none."""
        return [
            "" if isinstance(outcome, _Fault) else outcome
            for outcome in self._evaluate_samples(samples, "vote")
        ]

    def _evaluate_samples(
        self, samples: Sequence[RewardSample], method: Literal["score", "vote"]
    ) -> list[Any]:
        """Return the value of each sample, or a _Fault if it could not be computed."""
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
    """Build the rewards of a job, with at most one child process per core, and at most 8.

    `processes`: the number of trainer processes that share the cores. Raises InvalidInput if a
    package, a task or the user's file cannot be used.
    """
    cores = count_cores() // processes
    return Rewards(config, min(max(cores, 1), _MAX_JUDGES))


def length_penalty(tokens: int, length: LengthPenalty) -> float:
    """Return the penalty of an answer of `tokens` tokens (DAPO, arXiv 2503.14476, eq. 13).

    The penalty is 0 up to `free_tokens`, `weight` from `max_tokens` on, and linear in between.
    """
    overlong_share = (tokens - length.free_tokens) / (length.max_tokens - length.free_tokens)
    return length.weight * min(max(overlong_share, 0.0), 1.0)

"""What answers are worth: `make_rewards` makes the `Rewards` of a job. Imports no torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import LifoQueue
from typing import Any, Literal

import numpy as np

from clients.config.reward import LengthPenalty, RewardConfig
from student_trainer.rewards.judge import Judge, Unjudged
from student_trainer.rewards.sample import RewardSample, Scores
from student_trainer.rewards.scorers import Scorer, make_scorer

__all__ = ["RewardSample", "Rewards", "Scores", "make_rewards"]

log = logging.getLogger(__name__)

_MOST_JUDGES = 8
# They look at a few characters of the answer and can neither hang nor raise.
_HARMLESS = ("exact_match", "word_match", "f1")


class Rewards:
    """Judges answers, several at once. A context manager; its processes end with it."""

    def __init__(self, config: RewardConfig, judges: int) -> None:
        """Raises InvalidInput where the reward cannot be made."""
        self._length = config.length
        self._direct: Scorer | None = None
        self._idle: LifoQueue[Judge] = LifoQueue()
        self._judges: list[Judge] = []
        if config.type in _HARMLESS:
            self._direct = make_scorer(config)
            return
        self._judges = [Judge(config) for _ in range(judges)]
        self._judges[-1].start()  # the first one needed: a reward that cannot be made is told now
        for judge in self._judges:
            self._idle.put(judge)

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for judge in self._judges:
            judge.close()

    def __call__(self, samples: Sequence[RewardSample]) -> Scores:
        """In the order of `samples`. An answer that cannot be judged is counted, never raised."""
        outcomes = self._each(samples, "score")
        values = np.array([np.nan if isinstance(o, _Fault) else o for o in outcomes], np.float64)
        if self._length is not None:
            values -= [length_penalty(sample.tokens, self._length) for sample in samples]
        faults = tuple(str(o) for o in outcomes if isinstance(o, _Fault))
        if faults:
            log.warning(
                "%d of %d answers have no reward: one %s", len(faults), len(samples), faults[0]
            )
        return Scores(values, faults)

    def said(self, samples: Sequence[RewardSample]) -> list[str]:
        """What of each answer is its vote; "" where nothing is."""
        return ["" if isinstance(o, _Fault) else o for o in self._each(samples, "said")]

    def _each(self, samples: Sequence[RewardSample], what: Literal["score", "said"]) -> list[Any]:
        """A _Fault in place of what could not be found."""
        if self._direct is not None:
            return list(map(getattr(self._direct, what), samples))

        def asked(sample: RewardSample) -> Any:
            judge = self._idle.get()
            try:
                return getattr(judge, what)(sample)
            except Unjudged as error:
                return _Fault(str(error))
            finally:
                self._idle.put(judge)

        with ThreadPoolExecutor(len(self._judges), "judge") as pool:
            return list(pool.map(asked, samples))


class _Fault(str):
    """Why an answer was not judged."""


def make_rewards(config: RewardConfig, *, processes: int = 1) -> Rewards:
    """`processes`: how many trainers share this machine's cores. Raises InvalidInput."""
    cores = len(os.sched_getaffinity(0)) // processes
    return Rewards(config, min(max(cores, 1), _MOST_JUDGES))


def length_penalty(tokens: int, length: LengthPenalty) -> float:
    """0 up to `free_tokens`, `weight` from `max_tokens` on, a straight line between."""
    over = (tokens - length.free_tokens) / (length.max_tokens - length.free_tokens)
    return length.weight * min(max(over, 0.0), 1.0)

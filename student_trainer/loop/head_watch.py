"""Tells when probability leaves the head, which no curve of the loss does."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from clients.config.common import TrainingJob
from clients.config.rl import RLJob
from clients.runs.metrics_follower import Point

log = logging.getLogger(__name__)

_MASS = "topk/student_mass"


class HeadWatch:
    """Warns once, when the student's head holds less than half of what it held at first.

    A warning is an attempt's: one that goes on with an emptied head says so in its own log.
    """

    def __init__(self, history: Iterable[Point]) -> None:
        """`history`: the steps before, from the run's first; what is at first is theirs."""
        masses = (point.metrics.get(_MASS) for point in history)
        self._first = next((mass for mass in masses if mass is not None), None)
        self._told = False

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        mass = metrics.get(_MASS)
        if mass is None or self._told:
            return
        if self._first is None:
            self._first = mass
        if mass < self._first / 2:
            self._told = True
            log.warning(
                "step %d: the head holds %.2f of the student's probability, it held %.2f: the KL "
                "of the head alone may push it out; take a larger top_k, or the default tail",
                step,
                mass,
                self._first,
            )


def learns_from_a_head(config: TrainingJob) -> bool:
    """Whether the loss has a KL of a head: rewards alone may lead the student anywhere."""
    if not isinstance(config, RLJob):
        return True
    method = config.method
    taught = config.teacher is not None and method.teacher_beta > 0
    return bool(method.top_k) and method.kl_in == "loss" and (method.beta > 0 or taught)

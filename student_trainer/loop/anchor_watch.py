"""Whether student and anchor stay together: the method's section 9, and what to warn of.

Around where they are one, with learning rate alpha, KL weight beta and curvature lambda of the KL,
the gap d = theta - phi goes d <- (1 - alpha beta lambda) d + alpha g with each update of the
student, g the rest of its gradient, and d <- tau d with each of the anchor, every P updates.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from clients.config.rl import RLJob
from student_trainer.teachers.anchor import Anchor

log = logging.getLogger(__name__)


def contraction(
    *, tau: float, update_period: int, learning_rate: float, beta: float, curvature: float
) -> float:
    """tau |1 - alpha beta lambda|^P, what is left of a gap after a period: stable below 1."""
    return float(tau * abs(1 - learning_rate * beta * curvature) ** update_period)


class StabilityWatch:
    """Warns once, when what a step measured says that the gap to the anchor would grow by itself.

    Local and rough: the curvature is that along the gap, 2 KL / |d|^2, and AdamW's rate is at most
    its longest step, alpha sqrt(n) for n weights, over the gradient that it follows.
    """

    def __init__(self, config: RLJob, anchor: Anchor) -> None:
        """Every process must make one: the anchor is measured."""
        self._tau, self._period = config.anchor.tau, config.anchor.update_period
        self._beta = config.method.beta
        self._size, self._reach = anchor.size(), math.sqrt(anchor.elements)
        self._version = float(anchor.version)
        self._told = False

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        distance = metrics["anchor/gap"] * self._size
        if metrics["anchor/version"] != self._version:
            # The KL was of the gap before the anchor moved, which left tau of it.
            self._version = metrics["anchor/version"]
            distance = distance / self._tau if self._tau else 0.0
        gradient = metrics["grad_norm"]
        if self._told or not (distance and gradient):
            return
        left = contraction(
            tau=self._tau,
            update_period=self._period,
            learning_rate=metrics["lr"] * self._reach / gradient,
            beta=self._beta,
            curvature=2 * max(metrics.get("kl/anchor", 0.0), 0.0) / distance**2,
        )
        if left >= 1:
            self._told = True
            log.warning(
                "step %d: the pull of the anchor may overshoot: tau |1 - alpha beta lambda|^P is "
                "about %.2g, it should be below 1; lower method.beta or train.learning_rate",
                step,
                left,
            )

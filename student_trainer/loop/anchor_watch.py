"""A warning for an unstable anchor: the stability condition of the EMA anchor, checked every step.

Near the point where student (theta) and anchor (phi) are equal, the gap d = theta - phi follows

    d <- (1 - alpha beta lambda) d + alpha g     with each update of the student
    d <- tau d                                   with each update of the anchor, every P updates

where alpha is the learning rate, beta the weight of the KL, lambda the curvature of the KL and g
the rest of the gradient. The gap is stable if tau |1 - alpha beta lambda|^P < 1.
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
    """Return tau |1 - alpha beta lambda|^P, the factor of the gap after one period."""
    return float(tau * abs(1 - learning_rate * beta * curvature) ** update_period)


class StabilityWatch:
    """Logs one warning if the metrics of a step indicate an unstable gap to the anchor.

    The estimate is local and rough. The curvature is the one along the gap, 2 KL / |d|^2. AdamW's
    effective rate is bounded by its longest step, alpha sqrt(n) for n weights, divided by the norm
    of the gradient.
    """

    def __init__(self, config: RLJob, anchor: Anchor) -> None:
        """Collective: measures the norm of the anchor."""
        self._tau, self._period = config.anchor.tau, config.anchor.update_period
        self._beta = config.method.beta
        self._anchor_norm, self._sqrt_elements = anchor.size(), math.sqrt(anchor.elements)
        self._version = float(anchor.version)
        self._warned = False

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check the metrics of `step`. Requires anchor/gap, anchor/version, grad_norm and lr."""
        distance = metrics["anchor/gap"] * self._anchor_norm
        if metrics["anchor/version"] != self._version:
            # The KL was measured before the anchor moved; the move multiplied the gap by tau.
            self._version = metrics["anchor/version"]
            distance = distance / self._tau if self._tau else 0.0
        gradient = metrics["grad_norm"]
        if self._warned or not (distance and gradient):
            return
        gap_factor = contraction(
            tau=self._tau,
            update_period=self._period,
            learning_rate=metrics["lr"] * self._sqrt_elements / gradient,
            beta=self._beta,
            curvature=2 * max(metrics.get("kl/anchor", 0.0), 0.0) / distance**2,
        )
        if gap_factor >= 1:
            self._warned = True
            log.warning(
                "step %d: the KL to the anchor may be unstable: tau |1 - alpha beta lambda|^P is "
                "about %.2g and should be below 1; lower method.beta or train.learning_rate",
                step,
                gap_factor,
            )

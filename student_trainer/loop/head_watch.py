"""A warning for probability that leaves the head, which the loss curve does not show."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping

from clients.config.rl import RLJob
from clients.config.sft import SFTJob
from clients.config.tables.common import TrainingJob
from clients.runs.metrics_file import Point

log = logging.getLogger(__name__)

_MASS = "topk/student_mass"


class HeadWatch:
    """Logs one warning if the student's head mass falls below half of its first value.

    Each attempt warns once, so the log of a resumed run has the warning too.
    """

    def __init__(self, history: Iterable[Point]) -> None:
        """`history`: metrics before this attempt; their first head mass is the reference."""
        masses = (point.metrics.get(_MASS) for point in history)
        self._reference_mass = next((mass for mass in masses if mass is not None), None)
        self._warned = False

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check topk/student_mass of `step`; does nothing if the metric is missing."""
        mass = metrics.get(_MASS)
        if mass is None or not math.isfinite(mass) or self._warned:
            return
        if self._reference_mass is None:
            self._reference_mass = mass
        if mass < self._reference_mass / 2:
            self._warned = True
            log.warning(
                "step %d: the head holds %.2f of the student's probability, at first it held %.2f: "
                "a KL over the head alone can push it out; raise top_k, or use the default tail",
                step,
                mass,
                self._reference_mass,
            )


def learns_from_a_head(config: TrainingJob) -> bool:
    """Return whether the loss has a KL over a head; rewards alone may move the mass anywhere."""
    if isinstance(config, SFTJob):
        return False
    if not isinstance(config, RLJob):
        return True
    method = config.method
    learns_from_teacher = config.teacher is not None and method.teacher_beta > 0
    return (
        bool(method.top_k) and method.kl_in == "loss" and (method.beta > 0 or learns_from_teacher)
    )

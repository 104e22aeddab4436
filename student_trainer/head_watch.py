"""Tells when probability leaves the head, which no curve of the loss does."""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)

_MASS = "topk/student_mass"


class HeadWatch:
    """Warns once, when the student's head holds less than half of what it held at first."""

    def __init__(self) -> None:
        self._first: float | None = None
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
                "of the head alone may push it out; take a larger top_k, or another tail",
                step,
                mass,
                self._first,
            )

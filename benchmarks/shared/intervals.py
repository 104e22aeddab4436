"""The mean of few values and its confidence interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# Student's t: the 97.5% quantile for 1, 2, ... degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return (mean, half of its 95% interval) by Student's t; infinite for a single value."""
    if len(values) == 1:
        return values[0], math.inf
    quantile = _T[min(len(values) - 1, len(_T)) - 1]
    return statistics.mean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))

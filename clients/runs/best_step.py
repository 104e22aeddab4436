"""Which checkpoint of a run is its best one."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from clients.runs.metrics_follower import Point

# The first of them that was measured decides: +1, more is better.
_JUDGES = (("eval/reward", 1.0), ("eval/kl", -1.0), ("eval/kl_bound", -1.0))


def best_step(points: Iterable[Point], steps: Collection[int]) -> int | None:
    """Of `steps`, the one whose evaluation has the greatest eval/reward; in a job without rewards
    the least eval/kl, or eval/kl_bound where a store knows no more.

    Of equals, the one that has learned for longer. None where none was evaluated: steps that were
    not cannot be compared.
    """
    measured = {point.step: point.metrics for point in points if point.step in steps}
    for metric, sign in _JUDGES:
        known = [step for step in measured if metric in measured[step]]
        if known:
            return max(known, key=lambda step: (sign * measured[step][metric], step))
    return None

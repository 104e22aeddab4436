"""Selects the best checkpoint of a run by its held-out metrics."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from clients.runs.metrics_follower import Point

# The first metric in this list that was measured decides. Sign +1: larger is better.
_JUDGES = (("eval/reward", 1.0), ("eval/kl", -1.0), ("eval/kl_bound", -1.0))


def best_step(points: Iterable[Point], steps: Collection[int]) -> int | None:
    """Return the step in `steps` with the best evaluation, or None if none was evaluated.

    The best step has the largest eval/reward. Without rewards it has the smallest eval/kl, or
    eval/kl_bound if a store allows only the bound. Of equal values, the later step is returned.
    """
    measured = {point.step: point.metrics for point in points if point.step in steps}
    for metric, sign in _JUDGES:
        known = [step for step in measured if metric in measured[step]]
        if known:
            return max(known, key=lambda step: (sign * measured[step][metric], step))
    return None

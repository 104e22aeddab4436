"""Selects the best checkpoint of a run by its held-out metrics."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterable

from clients.runs.directory import RunDirectory
from clients.runs.metrics_file import Point, read_evaluations

log = logging.getLogger(__name__)

# The first of these metrics that was measured selects the step.
JUDGES = ("eval/reward", "eval/kl", "eval/kl_bound", "eval/cross_entropy")
# Names of held-out metrics whose larger values are better, and whose smaller values are better.
_LARGER = re.compile(r"eval/(anchor/)?(reward|accuracy|pass@\d+|maj@\d+)")
_SMALLER = re.compile(r"eval/(anchor/)?(kl|kl_bound|cross_entropy|perplexity)")


def sign_of(metric: str) -> float:
    """Return 1 if larger values of a metric are better, -1 if smaller values are better, else 0."""
    return float(bool(_LARGER.fullmatch(metric))) - float(bool(_SMALLER.fullmatch(metric)))


def best_step(points: Iterable[Point], steps: Collection[int]) -> int | None:
    """Return the step in `steps` with the best evaluation, or None if none was evaluated.

    The first metric of this list that was measured decides:

    - eval/reward: the largest value is best
    - eval/kl: the smallest value is best
    - eval/kl_bound: the smallest value is best; measured if the store allows only a bound of the KL
    - eval/cross_entropy: the smallest value is best; measured without a teacher

    If several steps have the best value, the last of them is returned.
    """
    metrics_by_step = {point.step: point.metrics for point in points if point.step in steps}
    for metric in JUDGES:
        measured_steps = [step for step in metrics_by_step if metric in metrics_by_step[step]]
        if measured_steps:
            sign = sign_of(metric)
            return max(
                measured_steps, key=lambda step: (sign * metrics_by_step[step][metric], step)
            )
    return None


def unproven_gain(points: Iterable[Point], step: int) -> str:
    """Return a sentence if `step` is not clearly better than the first evaluation, otherwise "".

    `step` is clearly better if the difference is more than two of its standard errors. The standard
    error of the difference assumes independent evaluations. Evaluations on the same prompts are
    correlated, so the true standard error is smaller.
    """
    metrics_by_step = {point.step: point.metrics for point in points}
    for metric in JUDGES:
        measured_steps = [
            measured_step
            for measured_step in metrics_by_step
            if f"{metric}_stderr" in metrics_by_step[measured_step]
        ]
        if step not in measured_steps or step == measured_steps[0]:
            continue
        first_metrics, best_metrics = metrics_by_step[measured_steps[0]], metrics_by_step[step]
        error = math.hypot(first_metrics[f"{metric}_stderr"], best_metrics[f"{metric}_stderr"])
        if sign_of(metric) * (best_metrics[metric] - first_metrics[metric]) > 2 * error:
            return ""
        return (
            f"no gain is shown: {metric} is {best_metrics[metric]:.4g} at the best step, {step}, "
            f"and {first_metrics[metric]:.4g} at step {measured_steps[0]}, which is not better by "
            f"two standard errors of the difference ({2 * error:.2g}); raise eval.prompts, or "
            "train longer"
        )
    return ""


def warn_of_chance(run: RunDirectory) -> None:
    """Log a warning if the best checkpoint of a run may be best only by chance.

    This is so if it is not clearly better than the first evaluation; see `unproven_gain`.
    """
    points = list(read_evaluations(run.metrics))
    best = best_step(points, run.checkpoint_steps())
    if best is not None and (sentence := unproven_gain(points, best)):
        log.warning("%s", sentence)

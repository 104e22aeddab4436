"""The time of each stage of a step: over a run in total, and in equal parts of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from clients.jobs.record import JobRecord

# The most parts that a run is divided into.
MOST_BARS = 30
_WHOLE = "time/step"


@dataclass(frozen=True)
class Stage:
    """A stage of a step. color: its number; neighbors differ for colour-blind readers too."""

    label: str
    metric: str
    color: int


# In the order of a step. Learning has no metric: it is the rest of a step.
STAGES = (
    Stage("sampling rollouts", "time/rollout", 6),
    Stage("computing rewards", "time/reward", 1),
    Stage("scoring by the anchor", "time/anchor", 0),
    Stage("log-probs of the old policy", "time/old_policy", 5),
    Stage("waiting for the teacher", "time/teacher_wait", 4),
    Stage("loss, forward and backward", "", 3),
    Stage("optimizer", "time/optim", 2),
)
# The label of time/rollout in a job that samples no answers: it has no length/truncated.
WITHOUT_ANSWERS = "making the sequences"


@dataclass(frozen=True)
class Bar:
    """Steps `first` to `last`. seconds: the mean of a step's seconds, for each stage."""

    first: int
    last: int
    seconds: Sequence[float]


def stages_of(record: JobRecord) -> list[Stage]:
    """Return the stages that a job has, in the order of a step; [] if no step was timed.

    A stage whose total rounds to 0 seconds and to 0% of the steps is none of them.
    """
    metrics, whole = record.metrics, sum(value for _, value in record.series(_WHOLE))
    if _WHOLE not in metrics:
        return []

    def counts(metric: str) -> bool:
        total = sum(value for _, value in record.series(metric))
        return total >= 0.5 or total >= 0.005 * whole > 0

    return [
        one
        if one.metric != "time/rollout" or "length/truncated" in metrics
        else replace(one, label=WITHOUT_ANSWERS)
        for one in STAGES
        if not one.metric or counts(one.metric)
    ]


def bars_of(record: JobRecord, stages: Sequence[Stage], most: int = MOST_BARS) -> list[Bar]:
    """Return at most `most` bars, each of an equal number of steps; `stages`: of the job."""
    timed = [point for point in record.points if _WHOLE in point.metrics]
    size = -(-len(timed) // most)
    bars = []
    for start in range(0, len(timed), size):
        part = timed[start : start + size]
        every = [_seconds(point.metrics, stages) for point in part]
        means = [sum(of_stage) / len(part) for of_stage in zip(*every, strict=True)]
        bars.append(Bar(part[0].step, part[-1].step, means))
    return bars


def _seconds(metrics: Mapping[str, float], stages: Sequence[Stage]) -> list[float]:
    found = [metrics.get(one.metric, 0.0) for one in stages]
    rest = max(0.0, metrics[_WHOLE] - sum(found))
    return [seconds if one.metric else rest for one, seconds in zip(stages, found, strict=True)]

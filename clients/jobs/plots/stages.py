"""The time of each stage of a training step: for all steps, and for equal parts of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from clients.jobs.record import JobRecord

# Maximum number of parts into which the steps of a run are divided.
MAX_BARS = 30
_STEP_METRIC = "time/step"


@dataclass(frozen=True)
class Stage:
    """A stage of a training step.

    - `label`: its name in plots
    - `metric`: the metric with its seconds per step; "" for the time outside all other stages
    - `color`: number of its color; people with color blindness can distinguish neighbouring colors
    """

    label: str
    metric: str
    color: int


# In the order of a step. Learning has no metric: it takes the remaining time of a step.
STAGES = (
    Stage("sampling rollouts", "time/rollout", 6),
    Stage("computing rewards", "time/reward", 1),
    Stage("scoring by the anchor", "time/anchor", 0),
    Stage("log-probs of the old policy", "time/old_policy", 5),
    Stage("waiting for the teacher", "time/teacher_wait", 4),
    Stage("loss, forward and backward", "", 3),
    Stage("optimizer", "time/optim", 2),
)
# The label of time/rollout in a job that samples no answers. Such a job has no length/truncated.
WITHOUT_ANSWERS = "making the sequences"


@dataclass(frozen=True)
class Bar:
    """A bar for the steps from `first` to `last`.

    `seconds`: for each stage, the mean seconds per step.
    """

    first: int
    last: int
    seconds: Sequence[float]


def stages_of(record: JobRecord) -> list[Stage]:
    """Return the stages of a job in their order within a step; [] if no step was timed.

    A stage is left out if its total time rounds to 0 seconds and to 0% of the time of all steps.
    """
    metrics, total_step_seconds = (
        record.metrics,
        sum(value for _, value in record.series(_STEP_METRIC)),
    )
    if _STEP_METRIC not in metrics:
        return []

    def is_significant(metric: str) -> bool:
        total = sum(value for _, value in record.series(metric))
        return total >= 0.5 or total >= 0.005 * total_step_seconds > 0

    return [
        stage
        if stage.metric != "time/rollout" or "length/truncated" in metrics
        else replace(stage, label=WITHOUT_ANSWERS)
        for stage in STAGES
        if not stage.metric or is_significant(stage.metric)
    ]


def bars_of(record: JobRecord, stages: Sequence[Stage], max_bars: int = MAX_BARS) -> list[Bar]:
    """Return at most `max_bars` bars, each for the same number of steps.

    `stages`: the stages of the job.
    """
    timed = [point for point in record.points if _STEP_METRIC in point.metrics]
    size = -(-len(timed) // max_bars)
    bars = []
    for start in range(0, len(timed), size):
        part = timed[start : start + size]
        seconds_by_step = [_stage_seconds(point.metrics, stages) for point in part]
        means = [sum(of_stage) / len(part) for of_stage in zip(*seconds_by_step, strict=True)]
        bars.append(Bar(part[0].step, part[-1].step, means))
    return bars


def _stage_seconds(metrics: Mapping[str, float], stages: Sequence[Stage]) -> list[float]:
    measured_seconds = [metrics.get(stage.metric, 0.0) for stage in stages]
    remaining_seconds = max(0.0, metrics[_STEP_METRIC] - sum(measured_seconds))
    return [
        seconds if stage.metric else remaining_seconds
        for stage, seconds in zip(stages, measured_seconds, strict=True)
    ]

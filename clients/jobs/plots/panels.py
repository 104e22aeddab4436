"""The panels and curves of a plot, independent of the output format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from clients.jobs.record import JobRecord
from clients.jobs.results import require_metric
from protos.errors import InvalidInput

# (title, metrics, logarithmic y axis); a panel is omitted if none of its metrics was recorded.
DEFAULT_PANELS = (
    ("loss", ("loss", "eval/cross_entropy"), False),
    ("KL, nats per token", ("kl/teacher", "kl/teacher_bound", "eval/kl", "eval/kl_bound"), True),
    ("KL to the anchor, nats per token", ("kl/anchor",), True),
    ("reward, accuracy", ("reward/mean", "eval/reward", "eval/accuracy"), False),
    ("tokens per second", ("tokens_per_sec",), False),
)
# Further panels for jobs whose answers a rollout engine samples.
ENGINE_METRIC = "rollout/lag"
ENGINE_PANELS = (
    ("steps that the sampling weights are behind", (ENGINE_METRIC,), False),
    ("importance weights, 1 on-policy", ("ratio/ess", "ratio/mean", "ratio/bounded"), False),
    ("KL of the sampling policy to the student, nats per token", ("ratio/kl",), False),
)
# A curve of at least SMOOTHED_FROM points is smoothed over this share of its points.
SMOOTHED_FROM, SMOOTHED_SHARE = 60, 1 / 40


@dataclass(frozen=True)
class Curve:
    """The values of one metric of one job, as a curve of a plot."""

    label: str
    """The name of the metric. In a plot of several jobs, the job id."""
    number: int
    """Index of the color: the index of the curve in its panel. In a plot of several jobs, the index
    of the job.
    """
    points: Sequence[tuple[float, float]]
    """(step, value), in order of step."""
    held_out: bool
    """True for an evaluation metric: it has few points, so each is marked."""


@dataclass(frozen=True)
class Panel:
    """A part of a plot: one or several curves on the same axes."""

    title: str
    curves: Sequence[Curve]
    log: bool
    """True for a logarithmic y axis. All values are then positive."""

    def spans(self) -> tuple[float, float, float, float]:
        """Return (first step, last step, lowest value, highest value) of all curves.

        If both steps or both values are equal, the range is widened, so that no range is empty.
        """
        xs = [x for curve in self.curves for x, _ in curve.points]
        ys = [y for curve in self.curves for _, y in curve.points]
        first_step, last_step, low, high = min(xs), max(xs), min(ys), max(ys)
        if first_step == last_step:
            first_step, last_step = first_step - 0.5, last_step + 0.5
        if low == high:
            low, high = _pad_range(low, self.log)
        return first_step, last_step, low, high

    def heights(self, values: Sequence[float]) -> list[float]:
        """Return the position of each value on the y axis, from 0 (bottom) to 1 (top)."""
        _, _, low, high = self.spans()
        if self.log:
            low, high, values = math.log(low), math.log(high), [math.log(v) for v in values]
        return [(value - low) / (high - low) for value in values]


def panels_of(records: Sequence[JobRecord], metrics: Sequence[str] = ()) -> list[Panel]:
    """Return a panel for each of `metrics`, or the default panels if `metrics` is empty.

    With several jobs, a panel has one curve per job. Raises InvalidInput if no job has recorded any
    metric yet, or if no job has recorded one of `metrics`.
    """
    metric_names = sorted(set().union(*(record.metrics for record in records)))
    if not metric_names:
        jobs = ", ".join(record.job.id for record in records)
        raise InvalidInput(f"no metrics are recorded yet: {jobs}", hint="wait for the first step")
    for metric in metrics:
        require_metric(metric, metric_names)
    records_with_metrics = [record for record in records if record.points]
    requested_panels = [(metric, (metric,), _is_kl(metric)) for metric in metrics]
    default_panels = (
        DEFAULT_PANELS + ENGINE_PANELS if ENGINE_METRIC in metric_names else DEFAULT_PANELS
    )
    candidates = (
        _make_panel(records_with_metrics, *panel_spec)
        for panel_spec in requested_panels or default_panels
    )
    panels = [panel for panel in candidates if panel is not None]
    # A capture has none of the default metrics: plot all of its metrics.
    return panels or [
        single_panel
        for m in metric_names
        if (single_panel := _make_panel(records_with_metrics, m, (m,), False)) is not None
    ]


def _make_panel(
    records: Sequence[JobRecord], title: str, metrics: Sequence[str], log: bool
) -> Panel | None:
    if len(records) == 1:
        recorded_metrics = [metric for metric in metrics if metric in records[0].metrics]
        candidates = [
            _make_curve(records[0], metric, metric, number)
            for number, metric in enumerate(recorded_metrics)
        ]
    else:  # one curve per job: of its first metric among `metrics`
        candidates = [
            next(
                (
                    first_curve
                    for m in metrics
                    if (first_curve := _make_curve(record, m, record.job.id, number)) is not None
                ),
                None,
            )
            for number, record in enumerate(records)
        ]
    curves = [curve for curve in candidates if curve is not None]
    # An unbiased estimate of the KL may be negative at a step, which a log axis cannot show.
    positive = [_drop_nonpositive(curve) for curve in curves] if log else []
    if log and all(curve.points for curve in positive):
        return Panel(title, positive, True) if curves else None
    return Panel(title, curves, False) if curves else None


def _make_curve(record: JobRecord, metric: str, label: str, number: int) -> Curve | None:
    points = [(float(step), value) for step, value in record.series(metric)]
    return Curve(label, number, points, metric.startswith("eval/")) if points else None


def _drop_nonpositive(curve: Curve) -> Curve:
    points = [(x, y) for x, y in curve.points if y > 0]
    return Curve(curve.label, curve.number, points, curve.held_out)


def _is_kl(metric: str) -> bool:
    return metric.startswith(("kl/", "eval/kl"))


def _pad_range(value: float, log: bool) -> tuple[float, float]:
    """Return a (low, high) range around `value`, for an axis on which all values are equal."""
    if log:
        return value / 1.5, value * 1.5
    # A metric that is always zero is a share or a count.
    return (value - abs(value) / 2, value + abs(value) / 2) if value else (0.0, 1.0)


def smooth_curve(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the moving average of a curve.

    The window is centered on its point, and is shorter near the ends of the curve. A curve of fewer
    than SMOOTHED_FROM points is returned unchanged.
    """
    if len(points) < SMOOTHED_FROM:
        return list(points)
    half_window = max(1, round(len(points) * SMOOTHED_SHARE / 2))
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    averages = []
    for index, (x, _) in enumerate(points):
        start, end = max(0, index - half_window), min(len(points), index + half_window + 1)
        averages.append((x, (sums[end] - sums[start]) / (end - start)))
    return averages


def choose_ticks(low: float, high: float, *, log: bool, max_ticks: int = 5) -> list[float]:
    """Return about `max_ticks` round numbers from `low` to `high`, for the ticks of an axis.

    Linear axis: the ticks are the multiples of a step, and the step is 1, 2 or 5 times a power of
    ten. Log axis: the ticks are 1, 2 or 5 times a power of ten. If fewer than three such numbers
    fit on a log axis, it gets the ticks of a linear axis.
    """
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for factors in ((1,), (1, 3), (1, 2, 5)):
            marks = [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]
            if len(marks) >= 3:
                return marks[:: math.ceil(len(marks) / (max_ticks + 1))]
    power = 10.0 ** math.floor(math.log10((high - low) / max_ticks))
    step = next(f * power for f in (1, 2, 5, 10) if (high - low) / (f * power) <= max_ticks)
    first_multiple = math.ceil(low / step - 1e-9)
    return [
        multiple * step for multiple in range(first_multiple, math.floor(high / step + 1e-9) + 1)
    ]

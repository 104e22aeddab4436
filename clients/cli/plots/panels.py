"""What a plot shows: panels of curves, the same on a terminal, in a picture and in a report."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from clients.jobs.record import JobRecord
from protos.errors import InvalidInput

# Title, metrics, logarithmic axis. A panel without a measurement is left out.
DEFAULTS = (
    ("loss", ("loss",), False),
    ("KL, nats a token", ("kl/teacher", "kl/teacher_bound", "eval/kl", "eval/kl_bound"), True),
    ("KL to the anchor, nats a token", ("kl/anchor",), True),
    ("reward, right answers", ("reward/mean", "eval/reward", "eval/accuracy"), False),
    ("tokens a second", ("tokens_per_sec",), False),
)
# From so many points on a curve is smoothed: over this share of them.
SMOOTHED_FROM, SMOOTHED_SHARE = 60, 1 / 40


@dataclass(frozen=True)
class Curve:
    """One metric of one job. `number` decides its color: where there are several jobs, it is the
    job's; `held_out`: measured rarely.
    """

    label: str
    number: int
    points: Sequence[tuple[float, float]]
    held_out: bool


@dataclass(frozen=True)
class Panel:
    """Curves on the same axes. `log` is whether the y axis is logarithmic."""

    title: str
    curves: Sequence[Curve]
    log: bool

    def spans(self) -> tuple[float, float, float, float]:
        """(first step, last step, lowest, highest), never empty in either direction."""
        xs = [x for curve in self.curves for x, _ in curve.points]
        ys = [y for curve in self.curves for _, y in curve.points]
        first, last, low, high = min(xs), max(xs), min(ys), max(ys)
        if first == last:
            first, last = first - 0.5, last + 0.5
        if low == high:
            low, high = _around(low, self.log)
        return first, last, low, high

    def heights(self, values: Sequence[float]) -> list[float]:
        """Of each value, 0 at the bottom of the panel and 1 at its top."""
        _, _, low, high = self.spans()
        if self.log:
            low, high, values = math.log(low), math.log(high), [math.log(v) for v in values]
        return [(value - low) / (high - low) for value in values]


def panels_of(records: Sequence[JobRecord], metrics: Sequence[str] = ()) -> list[Panel]:
    """A panel for each of `metrics`, or those that everybody asks for first.

    Raises InvalidInput for a metric that no job has.
    """
    known = sorted(set().union(*(record.metrics for record in records)))
    if not known:
        jobs = ", ".join(record.job.id for record in records)
        raise InvalidInput(f"nothing is measured yet: {jobs}", hint="wait for the first step")
    for metric in metrics:
        if metric not in known:
            close = difflib.get_close_matches(metric, known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(known)}"
            raise InvalidInput(f"no job has the metric '{metric}'", field="-m", hint=hint)
    measured = [record for record in records if record.points]
    asked = [(metric, (metric,), _is_kl(metric)) for metric in metrics]
    found = (_panel(measured, *one) for one in asked or DEFAULTS)
    panels = [panel for panel in found if panel is not None]
    # A capture has curves of its own.
    return panels or [p for m in known if (p := _panel(measured, m, (m,), False)) is not None]


def _panel(
    records: Sequence[JobRecord], title: str, metrics: Sequence[str], log: bool
) -> Panel | None:
    if len(records) == 1:
        measured = [metric for metric in metrics if metric in records[0].metrics]
        made = [_curve(records[0], metric, metric, n) for n, metric in enumerate(measured)]
    else:  # one curve a job: the first metric that it has
        made = [
            next((c for m in metrics if (c := _curve(one, m, one.job.id, n)) is not None), None)
            for n, one in enumerate(records)
        ]
    curves = [curve for curve in made if curve is not None]
    # An unbiased KL may be negative at a step, which a logarithm cannot show.
    positive = [_positive(curve) for curve in curves] if log else []
    if log and all(curve.points for curve in positive):
        return Panel(title, positive, True) if curves else None
    return Panel(title, curves, False) if curves else None


def _curve(record: JobRecord, metric: str, label: str, number: int) -> Curve | None:
    points = [(float(step), value) for step, value in record.series(metric)]
    return Curve(label, number, points, metric.startswith("eval/")) if points else None


def _positive(curve: Curve) -> Curve:
    points = [(x, y) for x, y in curve.points if y > 0]
    return Curve(curve.label, curve.number, points, curve.held_out)


def _is_kl(metric: str) -> bool:
    return metric.startswith(("kl/", "eval/kl"))


def _around(value: float, log: bool) -> tuple[float, float]:
    """The heights of a curve that has only one."""
    if log:
        return value / 1.5, value * 1.5
    # What was never anything but zero is a share, or a count.
    return (value - abs(value) / 2, value + abs(value) / 2) if value else (0.0, 1.0)


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means over a window that is cut at the ends; few points stay as they are."""
    if len(points) < SMOOTHED_FROM:
        return list(points)
    reach = max(1, round(len(points) * SMOOTHED_SHARE / 2))
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    made = []
    for place, (x, _) in enumerate(points):
        first, end = max(0, place - reach), min(len(points), place + reach + 1)
        made.append((x, (sums[end] - sums[first]) / (end - first)))
    return made


def ticks(low: float, high: float, *, log: bool, most: int = 5) -> list[float]:
    """Round numbers between the two: 1, 2 or 5 times a power of ten."""
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for factors in ((1,), (1, 3), (1, 2, 5)):
            found = [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]
            if len(found) >= 3:
                return found[:: math.ceil(len(found) / (most + 1))]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(f * power for f in (1, 2, 5, 10) if (high - low) / (f * power) <= most)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]

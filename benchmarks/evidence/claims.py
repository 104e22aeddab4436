"""Claims: what is compared, the effect with its 95% interval, and the verdict that follows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.shared.intervals import mean_and_interval
from benchmarks.shared.pages import format_table
from benchmarks.shared.results import RESULTS


@dataclass(frozen=True)
class Effect:
    """Differences of a comparison, one a seed. The claim holds where they are above `least`."""

    comparison: str
    differences: Sequence[float]
    least: float = 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Mean, and half of its 95% interval (Student's t over the seeds)."""
        return mean_and_interval(self.differences)

    @property
    def verdict(self) -> str:
        """`shown` and `refuted`: the interval lies on one side of `least`."""
        mean, half = self.interval
        if math.isinf(half):
            return "not shown"
        if mean - half > self.least:
            return "shown"
        return "refuted" if mean + half < self.least else "not shown"

    def cells(self, digits: int) -> list[str]:
        """Return the cells of a table: comparison, seeds, mean, interval, verdict."""
        mean, half = self.interval
        low, high = f"{mean - half:+.{digits}f}", f"{mean + half:+.{digits}f}"
        interval = "-" if math.isinf(half) else f"{low} to {high}"
        seeds = str(len(self.differences))
        return [self.comparison, seeds, f"{mean:+.{digits}f}", interval, self.verdict]


class Interval(Effect):
    """An effect whose interval was computed by the benchmark: [mean, low, high]."""

    def __init__(self, comparison: str, mean_low_high: Sequence[float]) -> None:
        super().__init__(comparison, list(mean_low_high))

    @property
    def verdict(self) -> str:
        """Shown: the whole interval is above 0.01."""
        return "shown" if self.differences[1] > 0.01 else "not shown"

    def cells(self, digits: int) -> list[str]:
        """Return the cells of a table."""
        mean, low, high = (f"{value:.{digits}f}" for value in self.differences)
        return [self.comparison, "-", mean, f"{low} to {high}", self.verdict]


def paired_differences(
    runs: Sequence[dict[str, Any]],
    value: str,
    better: dict[str, Any],
    worse: dict[str, Any],
    sign: float = 1.0,
) -> list[float]:
    """Return sign * (value of `better` - value of `worse`) for every seed that has both.

    `better` and `worse`: the fields that a run of each side has.
    """
    differences = []
    for run in runs:
        if run | better != run:
            continue
        worse_runs = [
            worse_run
            for worse_run in runs
            if worse_run["seed"] == run["seed"] and worse_run | worse == worse_run
        ]
        differences += [sign * (run[value] - worse_run[value]) for worse_run in worse_runs[:1]]
    return differences


def effects_table(effects: Sequence[Effect], unit: str, digits: int = 3) -> str:
    """Return a table of effects, largest first as given."""
    header = ["comparison", "seeds", f"effect, {unit}", "95% interval", "verdict"]
    return format_table(header, [effect.cells(digits) for effect in effects if effect.differences])


def overall_verdict(effects: Sequence[Effect]) -> str:
    """Return the verdict of a claim with several comparisons."""
    verdicts = {effect.verdict for effect in effects if effect.differences}
    if verdicts in ({"shown"}, {"refuted"}, {"not shown"}):
        return verdicts.pop()
    count = {name: sum(effect.verdict == name for effect in effects) for name in sorted(verdicts)}
    return ", ".join(f"{name} in {number}" for name, number in count.items())


def load_result(name: str) -> Any:
    """Return the results of a benchmark; None if it was not run."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


class Section:
    """A section of the page: its claim, effects, text, command and cost."""

    def __init__(self, claim: str, effects: Sequence[Effect], text: str, command: str, cost: str):
        self.claim, self.effects, self.text = claim, effects, text
        self.command, self.cost = command, cost

    @property
    def cells(self) -> list[str]:
        """Return the row of the table of claims: claim, verdict, command, cost."""
        return [self.claim, overall_verdict(self.effects), f"`{self.command}`", self.cost]

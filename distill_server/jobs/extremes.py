"""The extreme values of a job's metrics in its deleted events, for charts.

The remaining events of a long job are a sample of its steps, so a chart of them alone would not
show the peaks. The extremes are stored apart from the events. So means over the events stay
unbiased.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

# The number of equal parts of a job's steps; each has a smallest and a largest value by metric.
PARTS = 128

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Extremes:
    """Points (step, value) by metric, in ascending order of steps.

    `attempt` is the newest attempt of the events. If a later attempt repeats steps, the points of
    these steps are out of date.
    """

    attempt: int = 0
    curves: Mapping[str, Points] = field(default_factory=dict)


def read_extremes(connection: sqlite3.Connection, job_id: str) -> Extremes:
    """Return the extreme values in the deleted events of a job."""
    row = connection.execute(
        "SELECT attempt, curves FROM extremes WHERE job_id = ?", (job_id,)
    ).fetchone()
    if row is None:
        return Extremes()
    curves = json.loads(row["curves"])
    return Extremes(
        row["attempt"], {name: list(zip(*curves[name], strict=True)) for name in curves}
    )


def add_extremes(
    connection: sqlite3.Connection,
    job_id: str,
    rows: Sequence[sqlite3.Row],
    deleted: Collection[int],
) -> None:
    """Store the extreme values of the events that are going to be deleted.

    `rows` are the events of the job in order of seq, with `seq`, `step`, `attempt` and `metrics`;
    `deleted` are seqs of them. The caller opens the transaction.
    """
    known = read_extremes(connection, job_id)
    curves = {name: list(points) for name, points in known.curves.items()}
    new_points: list[tuple[int, Mapping[str, float]]] = []
    attempt = 0
    for row in rows:
        if row["metrics"] == "{}":
            continue
        step = row["step"]
        if row["attempt"] != attempt:
            attempt = row["attempt"]
            # This attempt repeats the later steps of the earlier attempts.
            new_points = [point for point in new_points if point[0] < step]
            if attempt > known.attempt:
                curves = {
                    name: [point for point in points if point[0] < step]
                    for name, points in curves.items()
                }
        if row["seq"] in deleted:
            new_points.append((step, json.loads(row["metrics"])))
    for step, metrics in new_points:
        for name, value in metrics.items():
            curves.setdefault(name, []).append((step, value))
    last_step = max((row["step"] for row in rows), default=0)
    thinned = {name: thin_points(points, last_step) for name, points in curves.items() if points}
    columns = {name: list(zip(*points, strict=True)) for name, points in thinned.items()}
    connection.execute(
        "INSERT OR REPLACE INTO extremes VALUES (?, ?, ?)",
        (job_id, max(attempt, known.attempt), json.dumps(columns, separators=(",", ":"))),
    )


def thin_points(points: Points, last_step: int) -> Points:
    """Return the lowest and the highest point of each part of the steps up to `last_step`.

    All parts have the same length: the smallest power of two that gives at most PARTS parts. When
    the job becomes longer, two parts become one part. Therefore, the result does not depend on
    earlier calls.
    """
    length = 1
    while last_step // length >= PARTS:
        length *= 2
    lowest: dict[int, tuple[int, float]] = {}
    highest: dict[int, tuple[int, float]] = {}
    for point in points:
        part = point[0] // length
        if part not in lowest or point[1] < lowest[part][1]:
            lowest[part] = point
        if part not in highest or point[1] > highest[part][1]:
            highest[part] = point
    return sorted({*lowest.values(), *highest.values()})

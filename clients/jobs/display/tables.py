"""Tables of jobs, as text and as HTML: a list of jobs, and a comparison of jobs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from clients.html import notebook_html
from clients.jobs.job import Job, JobState
from clients.jobs.record import JobRecord
from clients.jobs.results import (
    Measurement,
    Result,
    best_result,
    differing_labels,
    judging_metric,
    newest_result,
    require_metric,
    result_of,
)
from clients.jobs.view import duration
from protos.program.logs import plain

# The column of the metric that tells how far a job of its method has come.
RESULT = "result"
COLUMNS = ("id", "state", "steps", RESULT, "age", "attempt", "owner", "name", "reason")
# Columns that a narrow terminal leaves out, in this order. An id contains the name of its job.
OPTIONAL_COLUMNS = ("attempt", "name", "owner", "age", "steps", "state")
Row = Mapping[str, Any]
_READABLE_CHARS, _MIN_CHARS = 20, 6


@dataclass(frozen=True, repr=False)
class Comparison:
    """A table of jobs with the newest and the best value of a metric of each job.

    - `metric`: name of the metric; "" if no job was evaluated
    - `results`: the values of each job
    - `labels`: names of labels whose values are not the same for all jobs
    """

    metric: str
    results: Sequence[Result]
    labels: Sequence[str]

    @property
    def columns(self) -> list[str]:
        """The columns of `rows`."""
        varied_labels = [name for name in self.labels if name not in (*COLUMNS, "best")]
        names = varied_labels or ["name"]
        return ["id", *names, "state", "steps", self._last_column, "best"]

    @property
    def rows(self) -> list[Row]:
        """One row per job. If there are several jobs, an asterisk marks the best value."""
        best = best_result(self.results, self.metric) if len(self.results) > 1 else None
        return [self._row_of(result, best) for result in self.results]

    def _row_of(self, result: Result, best: Result | None) -> Row:
        job = result.job
        is_best = best is not None and result.equals(best)
        return {
            "id": job.id,
            "name": job.name,
            "state": job.state,
            "steps": _format_steps(job),
            **{name: job.labels.get(name, "-") for name in self.labels},
            self._last_column: _format_measured(result.last),
            "best": _format_measured(result.best) + (" *" if is_best else ""),
        }

    @property
    def _last_column(self) -> str:
        return self.metric or "no evaluation yet"

    def __repr__(self) -> str:
        return "\n".join(table_lines(self.columns, self.rows))

    def _repr_html_(self) -> str:
        return notebook_html([table_markup(self.columns, self.rows)])


def compare_records(records: Sequence[JobRecord], metric: str = "") -> Comparison:
    """Return the comparison of the jobs by a metric.

    `metric`: "" means the metric that selects the best checkpoint. Raises InvalidInput if `metric`
    is given and the jobs have only other metrics.
    """
    metrics = sorted(set().union(*(record.metrics for record in records)))
    if metric and metrics:
        require_metric(metric, metrics)
    metric = metric or judging_metric(record.points for record in records)
    results = [result_of(record.job, record.points, metric) for record in records]
    return Comparison(metric, results, differing_labels([record.job for record in records]))


def list_columns(jobs: Sequence[Job]) -> list[str]:
    """Return the names of the columns of a list of jobs."""
    has_owners = any(job.owner for job in jobs)
    return [column for column in COLUMNS if has_owners or column != "owner"]


def list_row(job: Job, now: float) -> Row:
    """Return the row of a job in a list of jobs. `now`: the present time in Unix seconds."""
    return {
        "id": job.id,
        "state": job.state,
        "steps": _format_steps(job),
        RESULT: newest_result(job),
        # The clocks of the two machines may differ.
        "age": duration(max(0.0, now - job.created_at)) if job.created_at else "-",
        "attempt": job.attempt,
        "owner": job.owner,
        "name": job.name,
        "reason": _state_reason(job),
    }


def table_lines(
    columns: Sequence[str],
    rows: Iterable[Row],
    max_width: int | None = None,
    optional_columns: Sequence[str] = (),
) -> list[str]:
    """Return a header and a line for each row, aligned and without control characters.

    `max_width`: maximum number of characters of a line; None: no limit. If the table is wider, it
    gets narrower in two steps. First, columns in `optional_columns` are left out, one by one, until
    the other columns fit with up to 20 characters each. Then the widest cells are cut: in the last
    column at the end, in other columns in the middle.
    """
    cells = {column: [column.upper()] for column in columns}
    for row in rows:
        for column in columns:
            cells[column].append(plain(str(row[column])))
    widths = {column: max(map(len, cells[column])) for column in columns}
    if max_width is not None:
        for column in optional_columns:
            if _width_of([min(width, _READABLE_CHARS) for width in widths.values()]) <= max_width:
                break
            widths.pop(column, None)
        while _width_of(widths.values()) > max_width and max(widths.values()) > _MIN_CHARS:
            widths[max(widths, key=widths.__getitem__)] -= 1
    last_column = [*widths][-1]
    return [
        "  ".join(
            _cut(cells[column][line], width, at_end=column == last_column).ljust(width)
            for column, width in widths.items()
        ).rstrip()
        for line in range(len(cells[last_column]))
    ]


def _width_of(widths: Collection[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _cut(text: str, width: int, *, at_end: bool) -> str:
    if len(text) <= width:
        return text
    end = 0 if at_end else (width - 3) // 2
    return f"{text[: width - 3 - end]}...{text[len(text) - end :]}"


def table_markup(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """Return an HTML table with a header. All text is escaped."""
    header = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(str(row[column]))}</td>' for column in columns)}</tr>"
        for row in rows
    )
    return f'<table class="columns"><tr>{header}</tr>{body}</table>'


def _format_steps(job: Job) -> str:
    return f"{job.step}/{job.max_steps}"


def _format_measured(measurement: Measurement | None) -> str:
    if measurement is None:
        return "-"
    error = "" if measurement.stderr is None else f" +-{measurement.stderr:.1g}"
    return f"{measurement.value:.4g}{error} @{measurement.step}"


def _state_reason(job: Job) -> str:
    """Return the phase of a job that waits or is being prepared.

    For other jobs, return their reason.
    """
    queued = job.state is JobState.QUEUED and job.phase.startswith("WAITING ")
    return job.phase if queued or job.state is JobState.PREPARING else job.reason

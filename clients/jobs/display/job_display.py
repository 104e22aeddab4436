"""JobDisplay: displays a job as text, in a notebook, as curves and as a live view."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from clients.html import notebook_html
from clients.jobs.display.live import show_job
from clients.jobs.display.tables import (
    Comparison,
    compare_records,
    list_columns,
    list_row,
    table_lines,
    table_markup,
)
from clients.jobs.job import Job, JobEvent
from clients.jobs.plots.notebook import job_markup, samples_markup
from clients.jobs.plots.preview_html import PreviewDisplay
from clients.jobs.record import JobRecord
from clients.jobs.results import newest_result, require_metric
from clients.jobs.view import describe_state
from protos.errors import DistillError, InvalidInput, NotFound

if TYPE_CHECKING:
    import pandas


class MetricCurve(NamedTuple):
    """The values of a metric by step.

    - `steps`: int64 [N], ascending
    - `values`: float64 [N], the value at each of these steps
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class AnswerSamples:
    """The answers that the newest evaluation sampled, with their prompts. `step`: its step."""

    step: int
    answers: Sequence[Mapping[str, Any]]

    def __repr__(self) -> str:
        return f"<AnswerSamples of step {self.step}: {len(self.answers)} answers>"

    def _repr_html_(self) -> str:
        return notebook_html(samples_markup(self.step, self.answers))


class JobDisplay(Job):
    """The methods that display a job. A subclass defines `record` and `watch`."""

    def record(self, *, with_notes: bool = False) -> JobRecord:
        """Return the job as it is now, with its metrics.

        `with_notes`: the record also has the samples, the preview and the environment.
        """
        raise NotImplementedError

    def watch(self, after_seq: int = 0, *, timeout: float | None = None) -> Iterator[JobEvent]:
        """Yield every event after `after_seq` until the job ends."""
        raise NotImplementedError

    def show(self, metrics: Sequence[str] = ()) -> None:
        """Show the job until it ends: progress, curves and samples.

        In a notebook, one output is updated. Elsewhere, lines of text are printed. `metrics`: names
        of the metrics to draw as curves; empty means those of `distill plot`. Raises the errors of
        `watch`.
        """
        show_job(self, self.watch(), self.record, metrics)

    def curve(self, metric: str) -> MetricCurve:
        """Return the steps and values of a metric, such as "kl/teacher".

        Raises InvalidInput if the job has not recorded the metric.
        """
        record = self.record()
        if not record.metrics:
            message = f"job {self.id} has not recorded a metric yet"
            raise InvalidInput(message, field="metric", hint="wait for the first step")
        require_metric(metric, sorted(record.metrics), field="metric")
        steps, values = zip(*record.series(metric), strict=True)
        return MetricCurve(np.array(steps, np.int64), np.array(values, np.float64))

    def frame(self) -> pandas.DataFrame:
        """Return all metrics as a pandas DataFrame: a row for each step, a column for each metric.

        Raises InvalidInput if pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise InvalidInput(
                "frame() needs pandas", hint="pip install pandas, or use curve(metric)"
            ) from None
        record = self.record()
        steps = pandas.Index([point.step for point in record.points], name="step")
        rows = [dict(point.metrics) for point in record.points]
        return pandas.DataFrame(rows, index=steps, columns=sorted(record.metrics))

    def samples(self) -> AnswerSamples:
        """Return the answers that the newest evaluation sampled.

        Raises NotFound if there are none.
        """
        notes = self.record(with_notes=True).notes
        if not notes.samples:
            hint = "samples are written by evaluations; wait for the first one"
            raise NotFound(f"job {self.id} has no samples", hint=hint)
        return AnswerSamples(notes.samples_step, notes.samples)

    def preview(self) -> PreviewDisplay:
        """Return the training data of the job, token by token.

        Raises NotFound if the training has not started.
        """
        preview = self.record(with_notes=True).notes.preview
        if preview is None:
            hint = "wait for the first step, or use clients.preview(job)"
            raise NotFound(f"job {self.id} has no preview", hint=hint)
        return PreviewDisplay.of(preview)

    def __repr__(self) -> str:
        parts = [self.id, repr(self.name), self.kind, describe_state(self.state, self.phase)]
        parts.append(f"{self.step}/{self.max_steps}")
        parts += [newest_result(self)] if self.metrics else []
        parts += [self.reason] if self.reason else []
        return f"<{type(self).__name__} {'  '.join(parts)}>"

    def _repr_html_(self) -> str:
        record = JobRecord(self, ())
        with suppress(DistillError):  # shown without curve and configuration
            newest = self.record()
            job = replace(self, config_json=newest.job.config_json)
            record = JobRecord(job, [point for point in newest.points if point.step <= self.step])
        return notebook_html(job_markup(record))


_Job = TypeVar("_Job", bound=JobDisplay)


class JobList(list[_Job]):
    """A list of jobs. A notebook or an interactive Python shows it as the table of `distill ls`."""

    def compare(self, metric: str = "") -> Comparison:
        """Compare the jobs as they are now; see `compare`."""
        return compare(self, metric)

    def _rows(self) -> list[Mapping[str, Any]]:
        now = time.time()
        return [list_row(job, now) for job in self]

    def __repr__(self) -> str:
        return "\n".join(table_lines(list_columns(self), self._rows())) if self else "[]"

    def _repr_html_(self) -> str:
        table = table_markup(list_columns(self), self._rows()) if self else "no jobs"
        return notebook_html([table])


def compare(jobs: Sequence[JobDisplay], metric: str = "") -> Comparison:
    """Compare the newest and the best value of a metric of each job, and the labels that differ.

    `metric`: name of the metric; "" means the metric that selects the best checkpoint. Raises
    InvalidInput if `metric` is given and the jobs have only other metrics.
    """
    return compare_records([job.record() for job in jobs], metric)

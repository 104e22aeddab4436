"""The live view of a job: in a notebook one output that changes, elsewhere lines of text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from clients.html import notebook_html
from clients.jobs.display.lines import PlainLines
from clients.jobs.job import Job, JobEvent
from clients.jobs.plots.notebook import live_markup
from clients.jobs.record import JobRecord, Notes, points_of
from clients.jobs.view import JobView, evaluation
from protos.errors import DistillError

SECONDS_BETWEEN_DRAWINGS = 0.5


class ReadRecord(Protocol):
    """A function that reads the job and its metrics as they are now."""

    def __call__(self, *, with_notes: bool) -> JobRecord:
        """Return the record of the job. `with_notes`: also with the samples of the job."""
        ...


def show_job(
    job: Job, events: Iterator[JobEvent], read_record: ReadRecord, metrics: Sequence[str]
) -> None:
    """Show a job until its `events` end: in a notebook as one output, elsewhere as lines.

    `metrics`: names of the metrics to draw as curves; empty means those of `distill plot`.
    """
    view = JobView(job.id, max_steps=job.max_steps)
    if not _in_notebook():
        lines = PlainLines(view, lambda line: print(line, flush=True))
        for event in events:
            view.add(event)
            lines.show(event)
        return
    block = NotebookBlock(job, view, read_record, metrics)
    try:
        for event in events:
            view.add(event)
            block.show(event)
    finally:
        block.draw()


class NotebookBlock:
    """The live view of a job in a notebook: one output that is drawn again while the job runs."""

    def __init__(
        self, job: Job, view: JobView, read_record: ReadRecord, metrics: Sequence[str]
    ) -> None:
        self._job = job
        self._view = view
        self._read_record = read_record
        self._metrics = metrics
        self._events: list[JobEvent] = []
        self._notes = Notes()
        self._drawn_at = 0.0
        self._drawn_phase: object = None
        self._output: Any = None

    def show(self, event: JobEvent) -> None:
        """Store an event, and draw the output again.

        The output is not drawn if the last drawing is recent and the phase of the job has not
        changed.
        """
        self._events.append(event)
        phase = (event.state, event.phase, event.attempt)
        is_due = time.monotonic() - self._drawn_at >= SECONDS_BETWEEN_DRAWINGS
        if evaluation(event.metrics) and is_due:
            self._read_samples()
        if is_due or phase != self._drawn_phase:
            self._drawn_phase = phase
            self._draw()

    def draw(self) -> None:
        """Read the newest samples, and draw the output again."""
        self._read_samples()
        self._draw()

    def html(self) -> str:
        """Return the view as HTML."""
        view, points = self._view, points_of(self._events)
        job = replace(
            self._job,
            state=view.state,
            phase=view.phase,
            reason=view.reason,
            attempt=view.attempt,
            step=view.step,
            max_steps=view.max_steps,
        )
        record = JobRecord(job, points, self._notes)
        return notebook_html(live_markup(record, view.facts(), self._metrics))

    def _read_samples(self) -> None:
        try:
            self._notes = self._read_record(with_notes=True).notes
        except DistillError:  # the view shows the samples before
            return

    def _draw(self) -> None:
        from IPython.display import HTML, display

        content = HTML(self.html())
        if self._output is None:
            self._output = display(content, display_id=True)
        else:
            self._output.update(content)
        self._drawn_at = time.monotonic()


def _in_notebook() -> bool:
    """Return whether this code runs in a notebook's kernel, which can display HTML."""
    get_shell: Callable[[], Any] = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return hasattr(get_shell(), "kernel")

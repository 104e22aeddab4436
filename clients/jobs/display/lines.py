"""The progress of a job as lines of text."""

from __future__ import annotations

import time
from collections.abc import Callable

from clients.jobs.job import TERMINAL, JobEvent, JobState
from clients.jobs.view import JobView, describe_state, evaluation
from protos.program.logs import plain

SECONDS_BETWEEN_LINES = 10.0


class PlainLines:
    """Prints the progress of a job as lines of text.

    A line is printed every 10 s, for each evaluation, and for each change of state or attempt.
    """

    def __init__(self, progress: JobView, say: Callable[[str], None]) -> None:
        """`progress`: state of the job, which the caller updates.

        `say`: a function that prints a line.
        """
        self._progress = progress
        self._say = say
        self._next_line_at = 0.0
        self._printed_state: tuple[JobState | None, int, str] = (None, 0, "")

    def show(self, event: JobEvent) -> None:
        """Print a line about `event`, or nothing.

        A line is printed for an evaluation, for a change of state or attempt, and if the last line
        is at least 10 s old.
        """
        # Changes of phase count before the first step only: later the phase changes with every
        # evaluation and checkpoint.
        phase = event.phase if event.step == 0 else self._printed_state[-1]
        state = (event.state, event.attempt, phase)
        is_due = bool(event.metrics) and time.monotonic() >= self._next_line_at
        if state != self._printed_state or is_due or evaluation(event.metrics):
            self._printed_state = state
            self._next_line_at = time.monotonic() + SECONDS_BETWEEN_LINES
            clock = time.strftime("%H:%M:%S", time.localtime(event.time))
            self._say(f"{clock}  {line_of(self._progress, event)}")


def line_of(job: JobView, event: JobEvent) -> str:
    """Return an event as one line: `job-7f3a RUNNING training  12/500  loss 0.41  eta 3m20s`."""
    parts = [f"{job.job_id} {describe_state(job.state, job.phase)}"]
    if job.attempt > 1:
        parts.append(f"attempt {job.attempt}")
    if job.step:
        parts.append(f"{job.step}/{job.max_steps}")
    if event.metrics:
        parts += [f"{name} {value}" for name, value in job.facts()]
        parts += [f"{name} {value:.4g}" for name, value in evaluation(event.metrics).items()]
    if job.reason and job.state in TERMINAL:
        parts.append(job.reason)
    return plain("  ".join(parts))

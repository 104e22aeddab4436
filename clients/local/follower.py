"""RunFollower: the events of one attempt, read from its run directory."""

from __future__ import annotations

import time
from collections.abc import Iterator

from clients.jobs.job import TERMINAL, JobEvent, JobState
from clients.jobs.record import STATES
from clients.runs.directory import RunDirectory, Status, Verdict
from clients.runs.metrics_file import MetricsTail, Point

SECONDS_BETWEEN_POLLS = 0.2


class RunFollower:
    """Reads the events of one attempt from its run directory. Each `poll` yields the new events.

    The trainer may replace metrics.jsonl during a `poll`, as it does when it resumes.
    """

    def __init__(self, run: RunDirectory, attempt: int, max_steps: int) -> None:
        self._run = run
        self._attempt = attempt
        self._max_steps = max_steps
        self._status = Status(attempt=attempt, verdict="running", phase="starting")
        self._newest = -1  # the newest step that `poll` returned
        self._tail = MetricsTail(run.metrics, attempt=attempt, seen_step=self._newest)
        self._seq = 0
        self._polled_at = time.time()

    @property
    def over(self) -> bool:
        """True if the attempt has ended, according to its status file."""
        return _job_state(self._status) in TERMINAL

    def poll(self) -> Iterator[JobEvent]:
        """Yield the events since the last call, or since the start of the attempt."""
        # Status before metrics: if the status says that the attempt has ended, all of its metrics
        # are on disk.
        status = self._run.read_status()
        self._polled_at = time.time()  # the same for all events of a poll: the pace is unknown
        for point in self._tail.read_all():
            self._newest = point.step
            yield self._make_event(self._status, point)
        if status is not None and status.attempt == self._attempt and status != self._status:
            previous = _job_state(self._status), self._status.phase, self._status.reason
            self._status = status
            if (_job_state(status), status.phase, status.reason) != previous:
                yield self._make_event(status)

    def trainer_died(self, reason: str, state: JobState = JobState.FAILED) -> JobEvent:
        """Return the final event of a trainer that exited without writing a final status.

        - `reason`: the reason of the event. If the trainer wrote a reason before, that reason is
          used instead, except for a cancelled attempt.
        - `state`: FAILED, or CANCELLED if the trainer was stopped on request
        """
        verdict: Verdict = "cancelled" if state is JobState.CANCELLED else "failed"
        if state is not JobState.CANCELLED:
            reason = self._status.reason or reason
        step = max(self._newest, 0)
        return self._make_event(
            Status(self._attempt, verdict, self._status.phase, step, self._max_steps, reason)
        )

    def _make_event(self, status: Status, point: Point | None = None) -> JobEvent:
        self._seq += 1
        return JobEvent(
            seq=self._seq,
            time=self._polled_at,
            state=_job_state(status),
            reason=status.reason,
            phase=status.phase,
            attempt=self._attempt,
            step=point.step if point else max(status.step, self._newest),
            max_steps=status.max_steps or self._max_steps,
            metrics=point.metrics if point else {},
        )


def _job_state(status: Status) -> JobState:
    if status.verdict == "running" and status.phase in ("", "starting", "preflight"):
        return JobState.PREPARING
    return STATES[status.verdict]

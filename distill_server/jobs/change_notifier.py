"""Notification of job changes, so that streams wait for an event instead of polling."""

from __future__ import annotations

import asyncio

from protos.errors import Unavailable

# Used in place of a job id, to wait for a change of any job.
ANY_JOB = ""


class ChangeNotifier:
    """Wakes the tasks that wait for a change of one job, or of any job (ANY_JOB).

    Each event is set once, so a task needs a new event for each wait. To miss no change, call
    `next_change` first, then read the store, then wait for the event. Not thread-safe: call all
    methods on the event loop.
    """

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}
        self._is_closed = False

    def next_change(self, job_id: str) -> asyncio.Event:
        """Return the event that the job's next change sets.

        Raises Unavailable if the server is stopping.
        """
        if self._is_closed:
            raise Unavailable("the server is stopping", hint="try again in a few seconds")
        return self._events.setdefault(job_id, asyncio.Event())

    def notify(self, job_id: str) -> None:
        """Wake the tasks that wait for this job and those that wait for ANY_JOB."""
        for name in (job_id, ANY_JOB):
            event = self._events.pop(name, None)
            if event is not None:
                event.set()

    def close(self) -> None:
        """Wake all waiting tasks; from now on `next_change` raises Unavailable."""
        self._is_closed = True
        for job_id in list(self._events):
            self.notify(job_id)

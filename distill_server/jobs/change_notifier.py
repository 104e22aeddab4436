"""Notification of job changes, so that streams wait for an event instead of polling."""

from __future__ import annotations

import asyncio

from protos.errors import Unavailable

# Used in place of a job id, to wait for a change of any job.
ANY_JOB = ""


class ChangeNotifier:
    """Wakes the tasks that wait for a change of one job, or of any job (ANY_JOB).

    A bell is an asyncio.Event that rings once; each wait needs a new one. To miss no change, call
    `of` first, then read the store, then wait for the bell. Not thread-safe: call all methods on
    the event loop.
    """

    def __init__(self) -> None:
        self._bells: dict[str, asyncio.Event] = {}
        self._closed = False

    def of(self, job_id: str) -> asyncio.Event:
        """Return the event that the job's next change sets.

        Raises Unavailable if the server is stopping.
        """
        if self._closed:
            raise Unavailable("the server is stopping", hint="try again in a few seconds")
        return self._bells.setdefault(job_id, asyncio.Event())

    def ring(self, job_id: str) -> None:
        """Wake the tasks that wait for this job and those that wait for ANY_JOB."""
        for name in (job_id, ANY_JOB):
            bell = self._bells.pop(name, None)
            if bell is not None:
                bell.set()

    def close(self) -> None:
        """Wake all waiting tasks; from now on `of` raises Unavailable."""
        self._closed = True
        for job_id in list(self._bells):
            self.ring(job_id)

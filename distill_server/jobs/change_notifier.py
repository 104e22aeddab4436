"""How streams wait for a job to change without asking again and again."""

from __future__ import annotations

import asyncio

from protos.errors import Unavailable

# In place of an id: the bell that every change of a job rings.
ANY_JOB = ""


class ChangeNotifier:
    """One bell per job that somebody waits for, and one for all of them.

    Take the bell first, look second, wait third: then no ring is lost.
    """

    def __init__(self) -> None:
        self._bells: dict[str, asyncio.Event] = {}
        self._closed = False

    def of(self, job_id: str) -> asyncio.Event:
        """The bell that the job's next change rings; raises Unavailable once the server stops."""
        if self._closed:
            raise Unavailable("the server is going away", hint="it may be back in a moment")
        return self._bells.setdefault(job_id, asyncio.Event())

    def ring(self, job_id: str) -> None:
        for name in (job_id, ANY_JOB):
            bell = self._bells.pop(name, None)
            if bell is not None:
                bell.set()

    def close(self) -> None:
        """Wake everybody for the last time."""
        self._closed = True
        for job_id in list(self._bells):
            self.ring(job_id)

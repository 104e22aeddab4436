"""The task that removes jobs which ended long ago, and deletes the files of removed jobs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from distill_server.people.audit import Audit
from distill_server.retention.removals import Removals
from protos.errors import WrongState

log = logging.getLogger(__name__)

_SECONDS_OF_A_DAY = 24 * 3600
# The pause between two queries for expired jobs; a removal by a user wakes the task at once.
_SECONDS_BETWEEN_PASSES = 600.0
# The largest number of jobs of one query.
_PAGE = 100


class Keeper:
    """Removes ended jobs after `keep_days`; None keeps them. One instance per server."""

    def __init__(
        self,
        removals: Removals,
        keep_days: float | None,
        now: Callable[[], float],
        audit: Audit | None = None,
    ) -> None:
        """`now` returns the time of the store's events, in Unix seconds."""
        self._audit = audit or Audit(None)
        self._removals = removals
        self._keep_days = keep_days
        self._now = now
        self._awake = asyncio.Event()
        removals.wake = self._awake.set

    async def run(self) -> None:
        """Remove expired jobs and delete their files until the task is cancelled."""
        while True:
            self._awake.clear()
            try:
                await self.run_once()
            except Exception:  # the database is full, for example
                log.exception("cannot remove jobs; trying again later")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SECONDS_BETWEEN_PASSES):
                    await self._awake.wait()

    async def run_once(self) -> None:
        """Remove the expired jobs, and delete the files of all removed jobs."""
        if self._keep_days is not None:
            cutoff = self._now() - self._keep_days * _SECONDS_OF_A_DAY
            while job_ids := self._removals.list_expired(cutoff, _PAGE):
                for job_id in job_ids:
                    # WrongState: a job that depends on this job was submitted meanwhile.
                    entry = self._audit.entry("RemoveJob", None, "", job_id)
                    with contextlib.suppress(WrongState), entry:
                        self._removals.remove(job_id)
                    await asyncio.sleep(0)  # let other tasks run
        await self._removals.delete_files()

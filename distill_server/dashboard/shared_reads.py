"""Reads of run directories and processes that all viewers of a page share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from distill_server.jobs.run_files import RunFiles

_FRESH_SECONDS = 2.0
_MAX_READS = 512


class SharedReads:
    """Runs each read at most every two seconds, for all viewers. Use it on the event loop.

    A read that has not returned is not repeated, so a directory that does not answer blocks one
    thread for each kind of read.
    """

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self._reads: dict[tuple[str, ...], tuple[float, asyncio.Future[Any]]] = {}

    async def read(self, key: tuple[str, ...], call: Callable[[], Any]) -> Any:
        """Return the result of `call`, which runs in a thread, or the last result for this key.

        Raises Unavailable if there is no result after a few seconds, and the errors of `call`.
        """
        current_time = time.monotonic()
        started_at, future = self._reads.get(key, (0.0, None))
        if future is None or (future.done() and current_time - started_at >= _FRESH_SECONDS):
            if len(self._reads) >= _MAX_READS:
                self._reads = {
                    old_key: old_read
                    for old_key, old_read in self._reads.items()
                    if not old_read[1].done()
                }
            future = self._files.start(call)
            self._reads[key] = current_time, future
        return await self._files.wait_for(future)

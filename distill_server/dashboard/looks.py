"""Reads of run directories and processes that all viewers of a page share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from distill_server.jobs.run_files import RunFiles

_FRESH_SECONDS = 2.0
_MOST_KEPT = 512


class Looks:
    """Makes each read at most every two seconds, however many users look. Use it on the event loop.

    A read that has not returned is not made again, so a directory that does not answer keeps one
    thread for each kind of read.
    """

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self._seen: dict[tuple[str, ...], tuple[float, asyncio.Future[Any]]] = {}

    async def look(self, key: tuple[str, ...], read: Callable[[], Any]) -> Any:
        """Return the result of `read`, which runs in a thread, or its last one for the same key.

        Raises Unavailable if there is none after a few seconds, and what `read` raises.
        """
        now = time.monotonic()
        at, future = self._seen.get(key, (0.0, None))
        if future is None or (future.done() and now - at >= _FRESH_SECONDS):
            if len(self._seen) >= _MOST_KEPT:
                self._seen = {k: seen for k, seen in self._seen.items() if not seen[1].done()}
            future = self._files.start(read)
            self._seen[key] = now, future
        return await self._files.result(future)

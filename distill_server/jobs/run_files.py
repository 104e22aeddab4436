"""Reads and writes run directories in threads, because a network file system may stop answering.

A call that never returns keeps its thread. The event loop stops waiting for the call after a time
limit, and the number of such threads is bounded. `SharedReads` shares reads between viewers.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from protos.errors import Unavailable

# The time limit after which a run directory is considered not to answer.
ANSWER_SECONDS = 5.0
# The largest number of calls that have not returned; each has its own thread.
_MAX_THREADS = 256

_T = TypeVar("_T")
_FRESH_SECONDS = 2.0
_MAX_READS = 512


class RunFiles:
    """Calls functions in daemon threads, which do not delay the end of the server.

    Create one instance per event loop, and call the methods on that loop.
    """

    def __init__(self, answer_seconds: float = ANSWER_SECONDS) -> None:
        self.answer_seconds = answer_seconds
        self._running_calls = 0

    def start(self, call: Callable[[], _T]) -> asyncio.Future[_T]:
        """Start `call` in a thread and return its future.

        Raises Unavailable if 256 calls are already running.
        """
        if self._running_calls >= _MAX_THREADS:
            raise _make_no_answer(self.answer_seconds)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        # Mark the error as retrieved: the caller may have stopped waiting.
        future.add_done_callback(
            lambda finished_future: finished_future.cancelled() or finished_future.exception()
        )

        def deliver(settle: Callable[[], None]) -> None:
            self._running_calls -= 1
            if not future.done():
                settle()

        def run() -> None:
            try:
                answer = call()
            except BaseException as error:  # noqa: BLE001 (the caller raises it)
                reason = error
                settle: Callable[[], None] = lambda: future.set_exception(reason)  # noqa: E731
            else:
                settle = lambda: future.set_result(answer)  # noqa: E731
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(deliver, settle)

        self._running_calls += 1
        threading.Thread(target=run, name="run-files", daemon=True).start()
        return future

    async def call(self, call: Callable[[], _T]) -> _T:
        """Return the result of the call.

        Raises Unavailable after `answer_seconds`; the call itself continues in its thread.
        """
        return await self.wait_for(self.start(call))

    async def wait_for(self, future: asyncio.Future[_T]) -> _T:
        """Return the result of a started call, with the time limit of `call`."""
        await asyncio.wait({future}, timeout=self.answer_seconds)
        if not future.done():
            raise _make_no_answer(self.answer_seconds)
        return future.result()


def _make_no_answer(seconds: float) -> Unavailable:
    return Unavailable(
        f"the run directory has not answered for {seconds:g} s",
        hint="check the disk or the network file system of the server's --runs",
    )


class SharedReads:
    """Runs each read at most every two seconds, for all viewers. Use it on the event loop.

    A read is not repeated while it runs. So a directory that does not answer blocks only one thread
    for each kind of read.
    """

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self._reads: dict[tuple[str, ...], tuple[float, asyncio.Future[Any]]] = {}

    async def read(self, key: tuple[str, ...], call: Callable[[], Any]) -> Any:
        """Return the result of `call`, which runs in a thread, or a recent result for the same key.

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

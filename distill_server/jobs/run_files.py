"""Reads and writes run directories in threads, because a network file system may stop answering.

A call that never returns keeps its thread. The event loop stops waiting for it after a time limit,
and the number of such threads is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from protos.errors import Unavailable

# The time limit after which a run directory is considered not to answer.
ANSWER_SECONDS = 5.0
# The largest number of calls that have not returned; each has its own thread.
_MAX_THREADS = 256

_T = TypeVar("_T")


class RunFiles:
    """Calls functions in daemon threads, which do not delay the end of the server.

    One instance per event loop; call the methods on it.
    """

    def __init__(self, answer_seconds: float = ANSWER_SECONDS) -> None:
        self.answer_seconds = answer_seconds
        self._running_calls = 0

    def start(self, call: Callable[[], _T]) -> asyncio.Future[_T]:
        """Start the call in a thread and return its future.

        Raises Unavailable if 256 calls have not returned.
        """
        if self._running_calls >= _MAX_THREADS:
            raise _make_no_answer(self.answer_seconds)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        # Mark the error as retrieved: the caller may have given up by then.
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
        """Return the result of the call. Raises Unavailable if it takes more than `answer_seconds`.

        The call itself continues in its thread.
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

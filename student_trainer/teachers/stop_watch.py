"""Ends the waits of a trainer for its services after a stop request.

After a stop request a job finishes its step and writes a last checkpoint. A service that does not
answer could delay the checkpoint past the time after which a server kills the trainer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from clients.teacher.client import TeacherClient

# A server kills a cancelled trainer after 60 s, and writing the checkpoint takes time too.
STOP_SECONDS = 20.0
_POLL_SECONDS = 0.5


def watch_stop(
    is_stop_requested: Callable[[], bool],
    is_over: Callable[[], bool],
    end_waits: Callable[[], bool],
) -> None:
    """From STOP_SECONDS after a stop request, call `end_waits` until it returns True.

    The three functions are called in a thread, which also ends when `is_over` returns True.
    """

    def watch() -> None:
        requested_at: float | None = None
        while not is_over():
            if requested_at is None and is_stop_requested():
                requested_at = time.monotonic()
            if (
                requested_at is not None
                and time.monotonic() - requested_at >= STOP_SECONDS
                and end_waits()
            ):
                return
            time.sleep(_POLL_SECONDS)

    threading.Thread(target=watch, name="stop-watch", daemon=True).start()


def end_requests_after_stop(client: TeacherClient, is_stop_requested: Callable[[], bool]) -> None:
    """After a stop request, fail the requests of a teacher that is away for STOP_SECONDS.

    The last checkpoint then has the last step that ended. A teacher that computes a large batch
    sends no rows, but answers health checks; the trainer waits for such a teacher.
    """

    def end_requests() -> bool:
        if client.silence_seconds >= STOP_SECONDS and not client.answers():
            client.fail_silent(f"for {STOP_SECONDS:g} s, and the job was asked to stop")
        return False

    watch_stop(is_stop_requested, lambda: client.is_closed, end_requests)

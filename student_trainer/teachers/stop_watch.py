"""Ends the waits of a trainer for its services after a stop request.

After a stop request, the trainer finishes its step and writes a last checkpoint. A service that
does not answer could delay this checkpoint too long, so that a server kills the trainer before.
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
    """Start a thread that ends the waits of this process after a stop request.

    - is_stop_requested: returns whether a stop is requested.
    - is_over: returns whether the thread is not needed any more; the thread then ends.
    - end_waits: ends the waits, and returns whether all have ended. The thread calls it repeatedly,
      from STOP_SECONDS after the stop request until it returns True.
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
    """After a stop request, let the requests fail if the teacher is silent for STOP_SECONDS.

    The last checkpoint then contains the last finished step. A teacher that computes a large batch
    sends no rows, but answers health checks. The trainer waits for such a teacher.
    """

    def end_requests() -> bool:
        if client.silence_seconds >= STOP_SECONDS and not client.answers():
            client.fail_silent(f"for {STOP_SECONDS:g} s, and the job was asked to stop")
        return False

    watch_stop(is_stop_requested, lambda: client.is_closed, end_requests)

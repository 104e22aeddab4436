"""A circuit breaker: after a failure, calls are skipped except for periodic retries."""

from __future__ import annotations

import time


class Breaker:
    """A circuit breaker. While open, it allows one attempt every `pause` seconds.

    It is closed until `trip` is called, and closed again by `close`. Not thread-safe.
    """

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._next_attempt: float | None = None

    @property
    def is_open(self) -> bool:
        """True from `trip` until `close`."""
        return self._next_attempt is not None

    def allows(self) -> bool:
        """Return whether the caller may make an attempt.

        While the breaker is open, a True result uses up the attempt that was due.
        """
        if self._next_attempt is None:
            return True
        now = time.monotonic()
        if now < self._next_attempt:
            return False
        self._next_attempt = now + self._pause
        return True

    def trip(self) -> None:
        """Open the breaker; the next attempt is due after `pause` seconds."""
        self._next_attempt = time.monotonic() + self._pause

    def close(self) -> None:
        """Close the breaker: every attempt is allowed again."""
        self._next_attempt = None

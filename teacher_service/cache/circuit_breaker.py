"""Stops asking what has just failed, and tries again now and then."""

from __future__ import annotations

import time


class Breaker:
    """Closed until `trip`; then one attempt every `pause` seconds until `close`."""

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._next_attempt: float | None = None

    @property
    def is_open(self) -> bool:
        return self._next_attempt is not None

    def allows(self) -> bool:
        """Whether to go ahead. While open this takes the attempt that has become due."""
        if self._next_attempt is None:
            return True
        now = time.monotonic()
        if now < self._next_attempt:
            return False
        self._next_attempt = now + self._pause
        return True

    def trip(self) -> None:
        self._next_attempt = time.monotonic() + self._pause

    def close(self) -> None:
        self._next_attempt = None

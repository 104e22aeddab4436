"""The time of events: that of the wall when the server starts, and steady from then on."""

from __future__ import annotations

import time
from collections.abc import Callable


def steady_clock() -> Callable[[], float]:
    """Unix seconds that no change of the machine's clock moves: durations stay true."""
    start = time.time() - time.monotonic()
    return lambda: start + time.monotonic()

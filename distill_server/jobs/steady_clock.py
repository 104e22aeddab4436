"""The clock for event times: wall-clock time at the server's start, then monotonic."""

from __future__ import annotations

import time
from collections.abc import Callable


def steady_clock() -> Callable[[], float]:
    """Return a function that returns Unix seconds unaffected by changes of the machine's clock."""
    start = time.time() - time.monotonic()
    return lambda: start + time.monotonic()

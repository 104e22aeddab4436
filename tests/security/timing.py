"""Time a function on each of two arguments, in nanoseconds."""

from __future__ import annotations

import random
import time
from collections.abc import Callable


def times_in_turns(
    action: Callable[[str], object], arguments: tuple[str, str], count: int = 10_000
) -> tuple[list[int], list[int]]:
    """Time `count` calls with each argument, in random order: other load affects both alike."""
    times: tuple[list[int], list[int]] = ([], [])
    order = random.Random(0)
    for _ in range(count):
        for index in order.sample((0, 1), 2):
            start_time = time.perf_counter_ns()
            action(arguments[index])
            times[index].append(time.perf_counter_ns() - start_time)
    return times

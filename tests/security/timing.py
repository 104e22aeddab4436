"""How long a look takes at each of two things, in nanoseconds."""

from __future__ import annotations

import random
import time
from collections.abc import Callable


def times_in_turns(
    look: Callable[[str], object], things: tuple[str, str], count: int = 10_000
) -> tuple[list[int], list[int]]:
    """`count` looks at each, in turns of an order by chance: what else runs falls on both."""
    times: tuple[list[int], list[int]] = ([], [])
    order = random.Random(0)
    for _ in range(count):
        for which in order.sample((0, 1), 2):
            began = time.perf_counter_ns()
            look(things[which])
            times[which].append(time.perf_counter_ns() - began)
    return times

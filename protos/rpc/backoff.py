"""The pauses between the attempts to reach something that does not answer."""

from __future__ import annotations

import random

# Not the global generator, which other code draws from.
_jitter = random.Random()


def backoff(failures: int, first: float, longest: float) -> float:
    """Return the seconds to wait after so many failures in a row (1 or more), with jitter.

    `first` after the first one, doubled for each further one up to `longest`, times a random number
    from 0.5 to 1, so that not all clients of a restarted server return at once.
    """
    pause = min(longest, first * 2.0 ** min(failures - 1, 30))
    return pause * _jitter.uniform(0.5, 1.0)

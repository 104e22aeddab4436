"""Time and memory of a piece of work on one device, and what is said when it cannot be done."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from benchmarks.process_memory import MIB

Work = Callable[[], object]


class Meter(Protocol):
    """Of one kind of device."""

    def milliseconds(self, work: Work, clear: Work) -> list[float]:
        """Of each repetition, after warm-up; `clear` is called before each and not timed."""

    def peak_bytes(self, work: Work) -> int | None:
        """The most memory that `work` took on top of what was taken; None: not known."""


class CudaMeter:
    """Milliseconds by CUDA events, memory as the caching allocator counts it."""

    def __init__(self, repetitions: int = 10, warm_up: int = 3) -> None:
        self._repetitions = repetitions
        self._warm_up = warm_up

    def milliseconds(self, work: Work, clear: Work) -> list[float]:
        for _ in range(self._warm_up):
            clear()
            work()
        found = []
        for _ in range(self._repetitions):
            clear()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            work()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end))
        return found

    def peak_bytes(self, work: Work) -> int | None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


class CpuMeter:
    """So that the same code runs where no GPU is: its figures mean nothing."""

    def milliseconds(self, work: Work, clear: Work) -> list[float]:
        clear()
        started = time.perf_counter()
        work()
        return [1000 * (time.perf_counter() - started)]

    def peak_bytes(self, work: Work) -> int | None:
        work()
        return None


def measure(
    meter: Meter, work: Work, *, clear: Work = lambda: None, left: Callable[[], int] = lambda: 0
) -> dict[str, Any]:
    """{ms, spread, peak_mib}: median, maximum over minimum, peak above what was there before and
    the bytes `left` behind; or {failed}: why not.
    """
    try:
        # Time first: what libraries allocate once is no part of the peak.
        times = meter.milliseconds(work, clear)
        clear()
        peak = meter.peak_bytes(work)
        behind = left()
    except torch.OutOfMemoryError:
        reason = "out of memory"
    except RuntimeError as error:  # of a peer's kernels, say: the other rows are still wanted
        reason = str(error).strip().splitlines()[0]
    else:
        clear()
        return {
            "ms": statistics.median(times),
            "spread": max(times) / min(times),
            "peak_mib": None if peak is None else (peak - behind) / MIB,
        }
    # Out of the handlers: what they caught keeps tensors alive.
    clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {"failed": reason}

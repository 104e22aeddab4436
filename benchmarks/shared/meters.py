"""Measures the time and peak memory of a function on a CUDA device or the CPU."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from benchmarks.shared.process_memory import MIB

Work = Callable[[], object]


class Meter(Protocol):
    """Measures on one kind of device."""

    def milliseconds(self, work: Work, clear: Work) -> list[float]:
        """Return the time of each repetition after a warm-up. `clear` runs before each, untimed."""

    def peak_bytes(self, work: Work) -> int | None:
        """Return the peak memory of `work` above the memory in use before; None if unknown."""


class CudaMeter:
    """Times by CUDA events; memory as counted by the caching allocator."""

    def __init__(self, repetitions: int = 10, warm_up: int = 3) -> None:
        self._repetitions = repetitions
        self._warm_up = warm_up

    def milliseconds(self, work: Work, clear: Work) -> list[float]:
        for _ in range(self._warm_up):
            clear()
            work()
        milliseconds = []
        for _ in range(self._repetitions):
            clear()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            work()
            end.record()
            end.synchronize()
            milliseconds.append(start.elapsed_time(end))
        return milliseconds

    def peak_bytes(self, work: Work) -> int | None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


class CpuMeter:
    """Runs the same code without a GPU, for tests; its numbers are meaningless."""

    def milliseconds(self, work: Work, clear: Work) -> list[float]:
        clear()
        started = time.perf_counter()
        work()
        return [1000 * (time.perf_counter() - started)]

    def peak_bytes(self, work: Work) -> int | None:
        work()
        return None


def measure(
    meter: Meter,
    work: Work,
    *,
    clear: Work = lambda: None,
    count_remaining_bytes: Callable[[], int] = lambda: 0,
) -> dict[str, Any]:
    """Measure `work`; return {ms, spread, peak_mib}, or {failed: reason} if it raises.

    `ms` is the median and `spread` the maximum over the minimum. `peak_mib` is the peak above the
    memory in use before and the bytes that `work` leaves, as counted by
    `count_remaining_bytes`.
    """
    try:
        # Measure time first, so that one-time allocations of libraries are not part of the peak.
        times = meter.milliseconds(work, clear)
        clear()
        peak = meter.peak_bytes(work)
        remaining_bytes = count_remaining_bytes()
    except torch.OutOfMemoryError:
        reason = "out of memory"
    except RuntimeError as error:  # for example from a peer's kernels; keep measuring the others
        reason = str(error).strip().splitlines()[0]
    else:
        clear()
        return {
            "ms": statistics.median(times),
            "spread": max(times) / min(times),
            "peak_mib": None if peak is None else (peak - remaining_bytes) / MIB,
        }
    # Outside the handlers, because a caught exception keeps tensors alive.
    clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {"failed": reason}

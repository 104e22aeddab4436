"""The resident memory of processes, as counted by Linux, in bytes."""

from __future__ import annotations

import ctypes
from pathlib import Path

MIB = 1 << 20


def resident_before() -> int:
    """Return the resident bytes of this process, after trimming the heap and resetting the peak."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def resident_peak() -> int:
    """Return the peak of resident bytes since `resident_before`."""
    return _status("VmHWM")


def peak_of(process: int) -> int:
    """Return the peak of resident bytes of another process; 0 if it has ended."""
    try:
        return _field(Path(f"/proc/{process}/status"), "VmHWM")
    except (OSError, KeyError):
        return 0


def available() -> int:
    """Return the bytes of memory that are available on this machine."""
    return _field(Path("/proc/meminfo"), "MemAvailable")


def _status(name: str) -> int:
    return _field(Path("/proc/self/status"), name)


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)

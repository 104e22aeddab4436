"""The memory of this process, as Linux counts it."""

from __future__ import annotations

import ctypes
from pathlib import Path

MIB = 1 << 20


def resident_before() -> int:
    """Bytes resident now; the peak is forgotten, and so is what was freed but not given back."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def resident_peak() -> int:
    """The most bytes that were resident since `resident_before`."""
    return _status("VmHWM")


def peak_of(process: int) -> int:
    """The most bytes that another process had resident until now; 0 where it has ended."""
    try:
        return _field(Path(f"/proc/{process}/status"), "VmHWM")
    except (OSError, KeyError):
        return 0


def available() -> int:
    """Bytes that this machine could still give."""
    return _field(Path("/proc/meminfo"), "MemAvailable")


def _status(name: str) -> int:
    return _field(Path("/proc/self/status"), name)


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)

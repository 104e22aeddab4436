"""The resident memory of processes, as counted by Linux, in bytes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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


def anonymous() -> int:
    """Return the resident bytes of this process that are not pages of a file."""
    return _status("RssAnon")


def printed_by_group(processes: int, module: str, arguments: Sequence[str]) -> Iterator[str]:
    """Run `python -m module` in a gloo group on the CPU, and yield the lines that it prints.

    Raises CalledProcessError if a process fails.
    """
    command = [sys.executable, "-m"]
    if processes > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        # Freed memory goes back to the kernel at once, so that it counts what is in use.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
    }
    command += [module, *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as group:
        assert group.stdout is not None
        yield from group.stdout
    if group.returncode:
        raise subprocess.CalledProcessError(group.returncode, command)


def peak_of(process: int) -> int:
    """Return the peak of resident bytes of another process; 0 if it has ended."""
    try:
        return _field(Path(f"/proc/{process}/status"), "VmHWM")
    except (OSError, KeyError):
        return 0


@contextmanager
def peak_of_children(pause_seconds: float = 0.5) -> Iterator[list[int]]:
    """Yield a list whose only value becomes the peak of the bytes of all child processes together.

    Children of children count too. A page that processes share counts once (PSS). The peak is that
    of readings which are `pause_seconds` apart.
    """
    import psutil

    peak, over, here = [0], threading.Event(), psutil.Process()

    def held(child: psutil.Process) -> int:
        with suppress(psutil.Error):  # it has ended
            return int(child.memory_full_info().pss)
        return 0

    def read() -> None:
        while not over.wait(pause_seconds):
            peak[0] = max(peak[0], sum(map(held, here.children(recursive=True))))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield peak
    finally:
        over.set()
        reader.join()


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

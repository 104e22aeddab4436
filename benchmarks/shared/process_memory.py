"""The resident memory of processes, as counted by Linux, in bytes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 1 << 20


def resident_before() -> int:
    """Return the resident bytes of this process, after trimming the heap and resetting the peak."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _read_status("VmRSS")


def resident_peak() -> int:
    """Return the peak of resident bytes since `resident_before`."""
    return _read_status("VmHWM")


def anonymous_bytes() -> int:
    """Return the resident bytes of this process that are not pages of a file."""
    return _read_status("RssAnon")


def run_group(processes: int, module: str, arguments: Sequence[str]) -> Iterator[str]:
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


def peak_bytes_of(process: int) -> int:
    """Return the peak of resident bytes of another process; 0 if it has ended."""
    try:
        return _read_field(Path(f"/proc/{process}/status"), "VmHWM")
    except (OSError, KeyError):
        return 0


@dataclass
class Peak:
    """The peak of the sum of bytes of some processes, and the bytes of each at that time.

    A process: its name, and the bytes of its own pages (`own`), of files (`file`: libraries and
    mapped weights) and of shared memory (`shared`). A page that processes share counts once (PSS).
    """

    bytes: int = 0
    processes: list[dict[str, Any]] = field(default_factory=list)
    stages: dict[str, int] = field(default_factory=dict)  # the most bytes in each stage


@contextmanager
def track_peak_of_children(
    pause_seconds: float = 0.5, stage: Callable[[], str] = lambda: ""
) -> Iterator[Peak]:
    """Yield a `Peak` of all descendant processes, updated every `pause_seconds`.

    stage: returns the name of the current stage of the processes.
    """
    import psutil

    peak, finished, this_process = Peak(), threading.Event(), psutil.Process()

    def count_bytes(child: psutil.Process) -> Iterator[dict[str, Any]]:
        with suppress(psutil.Error, OSError, KeyError):  # it has ended
            path = Path(f"/proc/{child.pid}/smaps_rollup")
            kinds = {"own": "Pss_Anon", "file": "Pss_File", "shared": "Pss_Shmem"}
            bytes_by_kind = {kind: _read_field(path, name) for kind, name in kinds.items()}
            command = child.cmdline()
            module = command[command.index("-m") + 1] if "-m" in command else child.name()
            yield {"name": module, **bytes_by_kind}

    def read_until_finished() -> None:
        while not finished.wait(pause_seconds):
            name = stage()
            child_processes = [
                child_bytes
                for child in this_process.children(recursive=True)
                for child_bytes in count_bytes(child)
            ]
            total = sum(
                child_bytes["own"] + child_bytes["file"] + child_bytes["shared"]
                for child_bytes in child_processes
            )
            peak.stages[name] = max(total, peak.stages.get(name, 0))
            if total > peak.bytes:
                peak.bytes, peak.processes = total, child_processes

    reader = threading.Thread(target=read_until_finished)
    reader.start()
    try:
        yield peak
    finally:
        finished.set()
        reader.join()


def available_bytes() -> int:
    """Return the bytes of memory that are available on this machine."""
    return _read_field(Path("/proc/meminfo"), "MemAvailable")


def _read_status(name: str) -> int:
    return _read_field(Path("/proc/self/status"), name)


def _read_field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)

"""CPU time, memory and GPUs of an attempt's processes on this machine. Blocking; Linux only."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distill_server.runners.local.process import boot_id, consumption, family
from distill_server.runners.local.shim_files import card_of, processes_of

_GPU_FIELDS = "index,uuid,name,utilization.gpu,memory.used,memory.total"
_GPU_SECONDS = 3.0
_MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """The use of one GPU by all processes together, as nvidia-smi reports it.

    `busy` is a share from 0 to 1, memory is in bytes. None means that nvidia-smi does not report
    the value.
    """

    index: int
    uuid: str
    name: str
    busy: float | None
    memory_used: int | None
    memory_total: int | None


@dataclass(frozen=True)
class Usage:
    """The resources that the processes of an attempt use.

    - processes: number of processes.
    - cpu_seconds: CPU time since the start of the processes, including ended child processes.
    - memory_bytes: resident memory; a page that two processes share is counted twice.
    - cpus: number of CPU threads of the machine.
    - machine_memory: memory of the machine in bytes.
    - gpus: the GPUs that the processes can use.
    """

    processes: int
    cpu_seconds: float
    memory_bytes: int
    cpus: int
    machine_memory: int
    gpus: Sequence[Gpu]


def usage_of(directory: Path) -> Usage | None:
    """Return the usage of the attempt with this log directory.

    Returns None if the attempt has no processes on this machine.
    """
    card = card_of(directory)
    if card is None or card.shim.boot_id != boot_id():
        return None
    members = family(card.mark, processes_of(directory))
    usages = [usage for process in members if (usage := consumption(process))]
    if not usages:
        return None
    return Usage(
        processes=len(usages),
        cpu_seconds=sum(seconds for seconds, _ in usages),
        memory_bytes=sum(size for _, size in usages),
        cpus=os.cpu_count() or 1,
        machine_memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        gpus=[gpu for gpu in all_gpus() if _is_visible(gpu, card.shim.pid)],
    )


def all_gpus() -> list[Gpu]:
    """Return the NVIDIA GPUs of this machine; none if nvidia-smi is missing, fails or hangs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        output = subprocess.run(
            [program, f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_GPU_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [gpu for line in output.splitlines() if (gpu := _parse_gpu(line))]


def _parse_gpu(line: str) -> Gpu | None:
    """Parse one line of nvidia-smi. Memory is in MiB, use in percent; `[N/A]` means unknown."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != _GPU_FIELDS.count(",") + 1 or not fields[0].isdecimal():
        return None
    busy, memory_used, memory_total = (
        int(text) if text.isdecimal() else None for text in fields[3:]
    )
    return Gpu(
        index=int(fields[0]),
        uuid=fields[1],
        name=fields[2],
        busy=None if busy is None else busy / 100,
        memory_used=None if memory_used is None else memory_used * _MIB,
        memory_total=None if memory_total is None else memory_total * _MIB,
    )


def _is_visible(gpu: Gpu, pid: int) -> bool:
    """Return True if $CUDA_VISIBLE_DEVICES of a process lists the GPU, or is not set."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return True
    values = dict(entry.partition("=")[::2] for entry in environment.split("\0"))
    visible_devices = values.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is None:
        return True
    names = [name.strip() for name in visible_devices.split(",") if name.strip()]
    return str(gpu.index) in names or any(gpu.uuid.startswith(name) for name in names)

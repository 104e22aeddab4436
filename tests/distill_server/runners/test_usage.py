"""Resource usage of an attempt's processes, compared with psutil; GPUs from nvidia-smi."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from distill_server.runners.local.process import MARK, boot_id, consumption, identity_of, write_json
from distill_server.runners.local.usage import Gpu, all_gpus, usage_of

# Uses CPU, has a child that ended, and then stops itself, so that all numbers stay constant.
BUSY = (
    "import os, signal, subprocess, sys, time\n"
    "subprocess.run([sys.executable, '-S', '-c', 'sum(range(3_000_000))'])\n"
    "while time.process_time() < 0.3: sum(range(1000))\n"
    "block = b'x' * (30 << 20)\n"
    "os.kill(os.getpid(), signal.SIGSTOP)\n"
)
NVIDIA_SMI_OUTPUT = """\
0, GPU-5f2b1c7e-0000-1111-2222-333344445555, NVIDIA H100 80GB HBM3, 87, 62210, 81559
1, GPU-9a8b7c6d-0000-1111-2222-333344445555, NVIDIA H100 80GB HBM3, [N/A], [N/A], 81559
3, GPU-1a2b3c4d-0000-1111-2222-333344445555, NVIDIA H100 80GB HBM3, 0, 0, 81559
"""


@pytest.fixture
def stopped_process() -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, MARK: "a-mark", "CUDA_VISIBLE_DEVICES": "3,GPU-9a8b"}
    process = subprocess.Popen([sys.executable, "-S", "-c", BUSY], env=environment)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    yield process
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{NVIDIA_SMI_OUTPUT}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


def write_card(directory: Path, pid: int, boot: str = "") -> None:
    identity = identity_of(pid)
    assert identity is not None
    card = {"boot_id": boot or boot_id(), "pid": pid, "start_time": identity.start_time}
    write_json(directory / "shim.json", {**card, "mark": "a-mark"})


def test_time_and_memory_of_a_process(stopped_process: subprocess.Popen[bytes]) -> None:
    identity = identity_of(stopped_process.pid)
    assert identity is not None
    consumed = consumption(identity)
    assert consumed is not None
    process = psutil.Process(stopped_process.pid)
    times = process.cpu_times()
    cpu_seconds = times.user + times.system + times.children_user + times.children_system
    # The kernel counts pages in batches: its files differ by less than a MiB a processor.
    rss = pytest.approx(process.memory_info().rss, abs=2 << 20)
    assert consumed == (pytest.approx(cpu_seconds, abs=0.02), rss)
    assert times.children_user > 0
    stopped_process.send_signal(signal.SIGKILL)
    stopped_process.wait()
    assert consumption(identity) is None


def test_an_attempt_with_its_gpus(
    stopped_process: subprocess.Popen[bytes], smi: Path, tmp_path: Path
) -> None:
    assert usage_of(tmp_path) is None
    write_card(tmp_path, stopped_process.pid)
    usage = usage_of(tmp_path)
    assert usage is not None
    assert usage.processes == 1
    assert usage.memory_bytes > 30 << 20
    # The two of three that $CUDA_VISIBLE_DEVICES lists, by index and by UUID prefix.
    assert [asdict(gpu) for gpu in usage.gpus] == [
        {
            "index": 1,
            "uuid": "GPU-9a8b7c6d-0000-1111-2222-333344445555",
            "name": "NVIDIA H100 80GB HBM3",
            "busy": None,
            "memory_used": None,
            "memory_total": 81559 << 20,
        },
        {
            "index": 3,
            "uuid": "GPU-1a2b3c4d-0000-1111-2222-333344445555",
            "name": "NVIDIA H100 80GB HBM3",
            "busy": 0.0,
            "memory_used": 0,
            "memory_total": 81559 << 20,
        },
    ]
    write_card(tmp_path, stopped_process.pid, boot="of another machine")
    assert usage_of(tmp_path) is None


def test_a_machine_without_a_driver(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all_gpus()[0] == Gpu(
        index=0,
        uuid="GPU-5f2b1c7e-0000-1111-2222-333344445555",
        name="NVIDIA H100 80GB HBM3",
        busy=0.87,
        memory_used=62210 << 20,
        memory_total=81559 << 20,
    )
    smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert all_gpus() == []
    smi.write_text("#!/bin/sh\necho 'No devices were found'\n")
    assert all_gpus() == []
    monkeypatch.setenv("PATH", str(smi.parent / "nothing"))
    assert all_gpus() == []

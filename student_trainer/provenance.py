"""environment.json: what an attempt ran on, for whoever asks later."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time

import torch

from clients.fence import require_unfenced
from clients.run_directory import RunDirectory, replace_file

_PACKAGES = ("distill-service", "torch", "transformers", "accelerate", "peft", "numpy", "grpcio")


def write_environment(run: RunDirectory, *, attempt: int, processes: int) -> None:
    """Of the newest attempt; the ones before it are in their logs."""
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    facts = {
        "attempt": str(attempt),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": f"{platform.node()}, {platform.platform()}",
        "devices": ", ".join(gpus) or "no GPU",
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "processes": str(processes),
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }
    require_unfenced()
    replace_file(run.path / "environment.json", json.dumps(facts, indent=2) + "\n")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"

"""Writes environment.json and code.diff: the machine, packages and code that an attempt ran on."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from pathlib import Path

import torch

from clients.runs.directory import RunDirectory, replace_file
from clients.runs.fence import require_unfenced
from student_trainer.run.source_code import source_code

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("distill-service", "torch", "transformers", "accelerate", "peft", "numpy", "grpcio")


def write_environment(run: RunDirectory, *, attempt: int, processes: int) -> None:
    """Write environment.json and code.diff of this attempt, over those of earlier attempts.

    code.diff exists only if the checkout has uncommitted changes. Raises WrongState if a newer
    attempt has taken over the run.
    """
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
        **{name: _installed_version(name) for name in _PACKAGES},
    }
    checkout = source_code(_ROOT)
    if checkout is not None:
        facts["commit"] = checkout.commit + (", and code.diff" if checkout.diff else "")
    require_unfenced()
    if checkout is not None and checkout.diff:
        replace_file(run.code_diff, checkout.diff)
    else:
        run.code_diff.unlink(missing_ok=True)  # written by an earlier attempt
    replace_file(run.path / "environment.json", json.dumps(facts, indent=2) + "\n")


def _installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"

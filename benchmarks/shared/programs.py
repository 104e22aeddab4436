"""Runs the programs of this repository as a user does: job files, options and one thread each."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "deploy" / "jobs"


def run_program(command: Sequence[str], log: Path) -> None:
    """Run a program to its end on one thread. Raises RuntimeError with the end of its log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        process = subprocess.run(
            command, stdout=out, stderr=out, cwd=ROOT, env=one_thread_environment()
        )
    if process.returncode:
        last_lines = log.read_text(errors="replace").splitlines()[-15:]
        raise RuntimeError("\n".join([f"{' '.join(command)} failed:", *last_lines]))


def one_thread_environment() -> dict[str, str]:
    """Return the environment of a process with one thread that loads nothing from the network."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def set_options(settings: Mapping[str, str]) -> list[str]:
    """Return the command-line options `--set KEY=VALUE` that override keys of a job file."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]

"""Ctrl-C in the first second of each command: no traceback, exit code 130."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Sends SIGINT to the process when it starts to import $INTERRUPT_AT.
INTERRUPTER = """
import os, signal, sys

class Interrupter:
    def find_spec(self, name, path, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
"""
CASES = [
    ("clients", ["ls"], "typer"),
    ("clients", ["ls"], "clients.cli.commands.plot"),
    ("clients", ["ls"], "clients.jobs.client"),
    ("clients", ["ls"], "grpc"),
    ("clients", ["config", "schema"], "pydantic"),
    ("distill_server", [], "typer"),
    ("distill_server", [], "distill_server.server"),
    ("distill_server", [], "grpc"),
    ("teacher_service", ["--model", "x"], "typer"),
    ("teacher_service", ["--model", "x"], "teacher_service.program"),
    ("teacher_service", ["--model", "x", "--engine", "fake"], "teacher_service.engines.fake"),
]


@pytest.mark.parametrize(
    ("program", "arguments", "module"), CASES, ids=[f"{case[0]}-{case[2]}" for case in CASES]
)
def test_early_interrupts_print_no_traceback(
    program: str, arguments: list[str], module: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTER)
    process = subprocess.run(
        [sys.executable, "-P", "-m", program, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "INTERRUPT_AT": module},
        cwd=tmp_path,
        # Background jobs of a shell ignore Ctrl-C, and their child processes inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        timeout=60,
    )
    assert (process.returncode, process.stdout, process.stderr) == (130, "", "")

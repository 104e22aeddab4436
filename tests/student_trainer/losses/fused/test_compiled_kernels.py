"""The kernels of the loss compile for three GPUs without spilling registers. Needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")

MAX_REGISTERS = 224  # of 255 per thread
MAX_SHARED = 2048


def test_no_kernel_spills_registers() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    module = "tests.student_trainer.losses.fused.compiled_kernels"
    command = [sys.executable, "-W", "error::UserWarning", "-m", module]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    forms = [json.loads(line) for line in process.stdout.splitlines()]
    assert len({tuple(form.values())[:4] for form in forms}) == 24
    for form in forms:
        assert (form["stack"], form["local"]) == (0, 0), form
        assert 0 < form["registers"] <= MAX_REGISTERS, form
        assert form["shared"] <= MAX_SHARED, form

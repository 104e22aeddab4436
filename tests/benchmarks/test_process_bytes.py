"""The memory of real processes, as the kernel counts it, against the formula of the benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.models.process_bytes import expected_bytes, main

pytestmark = pytest.mark.slow


def test_two_processes_hold_half_each(tmp_path: Path) -> None:
    out = tmp_path / "bytes.json"
    main(["--processes", "2", "--shardings", "fsdp2", "--widths", "128", "384", "--out", str(out)])
    (result,) = json.loads(out.read_text())
    stages, formula = result["stages"], expected_bytes(2, "fsdp2", widths=(128, 384))
    for stage, expected in formula.items():
        assert stages[stage][0] == pytest.approx(expected, rel=0.05), stage
    # Unsharded gradients until the last micro-batch took 16.0, and a float32 gathering 12.4.
    assert stages["second update"][1] < 13.5
    assert stages["gathered"][1] < 10

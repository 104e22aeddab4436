"""The benchmark of updates runs without a GPU too, at small sizes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.training import QUICK, main

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("ignore")  # of TRL
def test_every_case_runs(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    with torch.compiler.set_stance("force_eager"):  # the compiler takes minutes on a CPU
        main(["--device", "cpu", "--quick", "--out", str(out)])
    cases = json.loads(out.read_text())["cases"]
    assert len(cases) == 13
    assert sum(case["compile"] for case in cases) == 3
    for case in cases:
        if case["optimizer"] == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
            assert case["failed"] == "torchao is not installed"
            continue
        if case["method"].startswith("TRL") and importlib.util.find_spec("trl") is None:
            assert case["failed"] == "trl is not installed"
            continue
        tokens = QUICK.sequences * QUICK.length
        assert case["tokens_per_second"] == pytest.approx(tokens / case["seconds"])

"""The benchmark of rollouts on a GPU runs without one too, at small sizes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.timeout(1200),  # four starts of vLLM
]


def test_every_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.gpu.rollouts import GROUP, QUICK, RECORDS, main

    out = tmp_path / "found.json"
    main(["--device", "cpu", "--quick", "--out", str(out)])
    results = json.loads(out.read_text())
    record_names = {f"{top_k} ids, {draws} draws" for top_k, draws in RECORDS}
    peers = {"vLLM's own", "transformers' generate"}
    assert results["sampling"].keys() == {"model", *record_names, *peers}
    [push] = results["pushes"]
    assert push["bytes"] < 10**6
    assert min(push["write"], push["load"], push["least"]) > 0
    assert len(results["steps"]) == 2
    assert all(stages["step"] > 0 for stages in results["steps"].values())
    ratio = results["log_ratio"]
    assert ratio["tokens"] == GROUP * QUICK.tokens
    assert 0 < ratio["sigma"] < 0.2, "bfloat16 rounds; other weights would be some nats away"
    printed = capsys.readouterr().out
    assert all(f"\nR{number} " in printed for number in range(1, 5))

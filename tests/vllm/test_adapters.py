"""Adapters that requests name, on a real vLLM: rows of the merged model in float64."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from protos.errors import InvalidInput
from protos.rows.codec import RowBlock
from teacher_service.engines.vllm import VllmEngine
from teacher_service.models.adapters import read_adapters
from tests.teacher_service.adapters import save_adapter, save_merged
from tests.vllm.float64 import Exact, queries
from tests.vllm.model import VOCAB_SIZE, save_model

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.timeout(900),  # a start of vLLM takes 20 s, on a machine with other work minutes
]


@pytest.mark.parametrize("processes", [1, 2])
def test_rows_are_those_of_the_merged_model(processes: int, tmp_path: Path) -> None:
    """In one step with rows of the other adapter, and of none; again, with blocks of the cache."""
    model = save_model(tmp_path / "model")
    saved = {
        "math": save_adapter(model, tmp_path / "math", seed=1),
        "keys": save_adapter(model, tmp_path / "keys", seed=2, r=9, target_modules=["up_proj"]),
    }
    merged = {
        name: save_merged(model, adapter_path, tmp_path / f"m{name}")
        for name, adapter_path in saved.items()
    }
    exact = {name: Exact(path) for name, path in {"": model, **merged}.items()}
    adapters = read_adapters([f"{name}={path}" for name, path in saved.items()])
    engine = VllmEngine(
        str(model), max_batch_tokens=256, tensor_parallel_size=processes, adapters=adapters
    )
    try:
        assert len({engine.info.fingerprint_for(name) for name in exact}) == 3
        adapter_queries = [
            replace(query, adapter=name) for query in queries(VOCAB_SIZE) for name in exact
        ]
        for _ in range(2):
            for query, rows in zip(adapter_queries, engine.score(adapter_queries), strict=True):
                assert isinstance(rows, RowBlock), rows
                assert exact[query.adapter].differences(query, rows).largest < 1e-4
    finally:
        engine.close()


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    other_model = save_model(tmp_path / "other", hidden_size=128, layers=4)
    adapter = save_adapter(other_model, tmp_path / "adapter", seed=1)
    with pytest.raises(InvalidInput, match="cannot use the adapter") as caught:
        VllmEngine(str(model), adapters=read_adapters([f"math={adapter}"]))
    assert caught.value.field == "--adapter"

"""What the vLLM engines refuse: the same as the hf engines, before a process is started."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from protos.errors import InvalidInput
from student_trainer.rollout_service.engines.vllm import VllmRolloutEngine
from teacher_service.engines.vllm import VllmEngine
from teacher_service.program import (
    EndpointSettings,
    ScoringEngineSettings,
    VllmEngineSettings,
    make_engine,
)

ENGINES = [VllmEngine, VllmRolloutEngine]

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"
)


@needs_vllm
def test_models(tiny_model: Path, tmp_path: Path) -> None:
    own_code = shutil.copytree(tiny_model, tmp_path / "own_code")
    config = json.loads((own_code / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Model"}
    (own_code / "config.json").write_text(json.dumps(config))
    partial = shutil.copytree(tiny_model, tmp_path / "partial")
    weights = load_file(partial / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    cut = shutil.copytree(tiny_model, tmp_path / "cut")
    with (cut / "model.safetensors").open("r+b") as stream:
        stream.truncate(1000)
    cases = {
        str(own_code): "own Python code",
        str(partial): "no weights for model.layers.1.mlp.up_proj",
        str(cut): "cannot load",
        str(tmp_path / "absent"): "there is no directory",
    }
    for model, message in cases.items():
        with pytest.raises(InvalidInput, match=message) as caught:
            VllmEngine(model)
        assert caught.value.field == "--model"


@needs_vllm
def test_models_of_rollouts(tiny_model: Path, tmp_path: Path) -> None:
    """Their weights are not read: they come with the first order."""
    own_code = shutil.copytree(tiny_model, tmp_path / "own_code")
    config = json.loads((own_code / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Model"}
    (own_code / "config.json").write_text(json.dumps(config))
    cases = {str(own_code): "own Python code", str(tmp_path / "absent"): "no usable model"}
    for model, message in cases.items():
        with pytest.raises(InvalidInput, match=message) as caught:
            VllmRolloutEngine(model)
        assert caught.value.field == "--model"


@needs_vllm
@pytest.mark.parametrize("engine", ENGINES)
def test_a_dtype(engine: type, tiny_model: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        engine(str(tiny_model), dtype="float7")
    assert caught.value.field == "--dtype"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
@pytest.mark.parametrize("engine", ENGINES)
def test_vllm_is_missing(engine: type, tiny_model: Path) -> None:
    with pytest.raises(InvalidInput, match="not installed") as caught:
        engine(str(tiny_model))
    assert caught.value.field == "--engine"
    assert "[vllm]" in caught.value.hint


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"name": "vllm", "device": "cuda:1"}, "--device"),
        ({"name": "vllm", "batch_invariant": True}, "--batch-invariant"),
        ({"name": "hf", "vllm": VllmEngineSettings(2, 0.9)}, "--tensor-parallel-size"),
        ({"name": "hf", "endpoint": EndpointSettings("words", "")}, "--tokenizer"),
        ({"name": "vllm", "endpoint": EndpointSettings("", "name")}, "--served-model"),
        ({"name": "endpoint"}, "--tokenizer"),
    ],
)
def test_options_of_another_engine(settings: dict[str, object], field: str) -> None:
    plain: dict[str, object] = {
        "model": "never looked at",
        "dtype": "auto",
        "device": "auto",
        "batch_invariant": False,
        "max_batch_tokens": 1024,
        "max_top_k": 64,
        "vllm": VllmEngineSettings(1, 0.9),
    }
    with pytest.raises(InvalidInput) as caught:
        make_engine(ScoringEngineSettings(**{**plain, **settings}))
    assert caught.value.field == field
    assert caught.value.hint

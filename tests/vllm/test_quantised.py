"""Rows of quantised teachers on a real vLLM against float64, with the weights that they mean."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.gpu.quantised import largest_differences, main, measure_format, start_engine
from protos.errors import InvalidInput
from teacher_service.engines.hf import HfEngine
from teacher_service.engines.vllm import VllmEngine
from tests.vllm.float64 import Exact
from tests.vllm.quantised import (
    FORMATS,
    HEADS,
    head_format,
    round_states,
    save_plain,
    save_quantised,
)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.timeout(600),
]


# vLLM's kernels of FP8 in blocks, and for experts in 4 bits, on a CPU.
CPU_FLAGS = set(Path("/proc/cpuinfo").read_text().split())
AMX = "amx_tile" in CPU_FLAGS
needs_amx = pytest.mark.skipif(not AMX, reason="vLLM's CPU kernel needs AMX (Sapphire Rapids)")
IN_BLOCKS = "FP8, 128 x 128"
# Formats that vLLM's kernels do not compute on this processor, and why.
NEEDS_AVX512 = "processors with AVX-512 only" if "avx512f" not in CPU_FLAGS else ""
NEEDS_VNNI = "processors with AVX-512 VNNI only" if "avx512_vnni" not in CPU_FLAGS else ""
REFUSED = {
    "AWQ": NEEDS_AVX512,
    "GPTQ": NEEDS_AVX512,
    "compressed-tensors W4A16": NEEDS_AVX512,
    "compressed-tensors W8A8, int8": NEEDS_VNNI,
}


def assert_near(measures: dict[str, float]) -> None:
    assert measures["median"] < 1.5 * measures["rounding"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=needs_amx if name == IN_BLOCKS else ()) for name in sorted(FORMATS)],
)
def test_a_quantised_body(name: str, tmp_path: Path) -> None:
    """As near to float64 as transformers is, which rounds the states to the same dtype."""
    if REFUSED.get(name):
        with pytest.raises(InvalidInput, match=REFUSED[name]) as caught:
            measure_format(tmp_path, name)
        assert caught.value.field == "--model"
        return
    measures = measure_format(tmp_path, name)
    assert_near(measures)
    if FORMATS[name].rounded is None:  # rounding them changes more than 8 bits for a weight
        assert measures["unquantised"] > 2 * measures["median"]


@needs_amx
def test_experts_in_fp8(tmp_path: Path) -> None:
    """As Qwen3-235B-A22B-FP8 is: experts and attention quantised, the router not."""
    assert_near(measure_format(tmp_path, IN_BLOCKS, experts=True))


@pytest.mark.parametrize("name", ["AWQ", "compressed-tensors W4A16"])
def test_experts_in_4_bits_are_refused_on_a_cpu(name: str, tmp_path: Path) -> None:
    """Their kernel would round the inputs too: 0.05 nats from the rows of the model."""
    # Without AVX-512, the layers of its attention are refused first.
    reason = NEEDS_AVX512 or "rounds the inputs of experts|No WNA16 MoE"
    with pytest.raises(InvalidInput, match=reason) as caught:
        measure_format(tmp_path, name, experts=True)
    assert caught.value.field == "--model"


@pytest.mark.parametrize("name", sorted(HEADS))
def test_a_quantised_head(name: str, tmp_path: Path) -> None:
    """Its values times its scales: as exact as a head in float32."""
    plain = save_plain(tmp_path / "plain")
    chosen = "lm_head.weight".__eq__
    quantised, meant = save_quantised(plain, tmp_path, head_format(name), chosen)
    with start_engine(quantised) as engine:
        assert largest_differences(engine, Exact(meant)).largest < 1e-4
        assert largest_differences(engine, Exact(plain)).largest > 1e-2


@needs_amx
def test_fp8_in_body_and_head(tmp_path: Path) -> None:
    """Blocks that the vocabulary does not fill: 500 rows are 3.9 blocks."""
    form = FORMATS[IN_BLOCKS]
    plain = save_plain(tmp_path / "plain")

    def chosen(name: str) -> bool:
        return name.endswith(("_proj.weight", "lm_head.weight"))

    quantised, meant = save_quantised(plain, tmp_path, form, chosen)
    with start_engine(quantised) as engine:
        assert largest_differences(engine, Exact(meant)).median < 0.1


@pytest.mark.parametrize(
    ("quantisation", "reason"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "unheard_of"}, "unheard_of"),
    ],
)
def test_a_method_that_vllm_does_not_know(
    quantisation: dict[str, object], reason: str, tmp_path: Path
) -> None:
    path = save_plain(tmp_path / "plain")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = quantisation
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match=reason) as caught:
        VllmEngine(str(path))
    assert caught.value.field == "--model"


def test_a_quantised_model_without_some_scales(tmp_path: Path) -> None:
    """vLLM alone would start with whatever its memory had in their place."""
    plain = save_plain(tmp_path / "plain")
    quantised, _ = save_quantised(plain, tmp_path, FORMATS["AWQ"])
    weights = load_file(quantised / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.scales"]
    save_file(weights, quantised / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match="vLLM does not start"):
        VllmEngine(str(quantised))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_hf_engine(name: str, tmp_path: Path) -> None:
    """transformers computes with some formats, and names the package that others need."""
    form = FORMATS[name]
    plain = save_plain(tmp_path / "plain")
    quantised, meant = save_quantised(plain, tmp_path, form)
    if name in ("AWQ", "GPTQ"):
        with pytest.raises(InvalidInput, match=r"requires (gptqmodel|optimum)") as caught:
            HfEngine(str(quantised), device="cpu")
        assert caught.value.field == "--model"
        return
    exact, rounded = Exact(meant), HfEngine(str(meant), dtype=form.dtype, device="cpu")
    for model in (exact.model, rounded._model):
        round_states(model, form)
    ours = largest_differences(HfEngine(str(quantised), device="cpu"), exact).median
    assert ours < 1.5 * largest_differences(rounded, exact).median


def test_the_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    main(["--device", "cpu", "--quick", "--out", str(out)])
    dense, experts = json.loads(out.read_text())["rows"]
    if NEEDS_AVX512:
        assert NEEDS_AVX512 in dense["refused"]
    else:
        assert_near(dense)
    reason = NEEDS_AVX512 or ("rounds the inputs of experts" if AMX else "No WNA16 MoE")
    assert reason in experts["refused"]
    assert "AWQ, experts" in capsys.readouterr().out

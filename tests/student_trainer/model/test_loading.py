"""A memory-mapped student, whose weights are pages of the file until sharded, and sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks.models.tiny_configs import make_tiny_config
from clients.config.tables.common import StudentConfig
from student_trainer.model.loading import cast_weights, count_weights, load_model
from tests.student_trainer import tiny
from tests.student_trainer.model.loading_process import save_student

SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    # sqrt(20) scales Gemma's embeddings, and is not a bfloat16.
    "hidden_size": 20,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "dtype": "bfloat16",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
FAMILIES = [
    lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE)),
    lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS)),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mapped_student_is_cast_to_the_float32_one(family: Any, tmp_path: Path) -> None:
    family().to(torch.bfloat16).save_pretrained(tmp_path)
    student = StudentConfig(model=str(tmp_path))
    expected, mapped = load_model(student), load_model(student, mapped=True)
    assert {p.dtype for p in mapped.parameters()} == {torch.bfloat16}, "as in the file"
    cast_weights(mapped, bf16=False)
    for name in ("named_parameters", "named_buffers"):
        tensors = dict(getattr(mapped, name)())
        for key, tensor in getattr(expected, name)():
            assert tensors[key].dtype == tensor.dtype, key
            assert torch.equal(tensors[key], tensor), key
    ids = torch.arange(7)[None]
    assert torch.equal(mapped(ids).logits, expected(ids).logits)
    assert mapped.config.to_dict() == expected.config.to_dict()
    assert mapped.get_decoder().config.dtype == torch.float32


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("stored", "stated"),
    [
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("float16", "bfloat16"),
        ("mixed", "float16"),
    ],
)
def test_a_config_that_states_another_dtype_rounds_nothing(
    stored: str, stated: str, sharded: bool, tmp_path: Path
) -> None:
    model = FAMILIES[0]()
    if stored == "mixed":
        model.to(torch.bfloat16).model.norm.float()
        torch.nn.init.normal_(model.model.norm.weight)
    else:
        model.to(getattr(torch, stored))
    model.save_pretrained(tmp_path, max_shard_size="4KB" if sharded else "1GB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or not sharded
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": stated}))
    student = StudentConfig(model=str(tmp_path))
    expected_model, mapped_model = load_model(student), load_model(student, mapped=True)
    kind = torch.float32 if stored == "mixed" else getattr(torch, stored)
    assert {p.dtype for p in mapped_model.parameters()} == {kind}
    cast_weights(mapped_model, bf16=False)
    tensors = dict(mapped_model.named_parameters())
    for name, weight in expected_model.named_parameters():
        assert torch.equal(tensors[name], weight), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_weights_of_a_mapped_student(dtype: str, tmp_path: Path) -> None:
    FAMILIES[0]().to(torch.bfloat16).save_pretrained(tmp_path)
    student = StudentConfig.model_validate({"model": str(tmp_path), "dtype": dtype, "lora": {}})
    expected, mapped = (load_model(student, mapped=mapped) for mapped in (False, True))
    cast_weights(mapped, bf16=dtype == "bfloat16")
    tensors = dict(mapped.named_parameters())
    for name, weight in expected.named_parameters():
        if "lora_A" not in name:  # drawn at random
            assert torch.equal(tensors[name], weight), name
        assert tensors[name].dtype == weight.dtype, name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_four_processes_need_the_memory_of_one_float32_student(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Anonymous memory of four real processes."""
    small, large = tmp_path / "small", tmp_path / "large"
    save_student(small, 64, dtype)
    weights = save_student(large, 768, dtype)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command += ["-m", "tests.student_trainer.model.loading_process", str(small), str(large)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(run.stdout.splitlines()[-1]) < 1.3 * 4 * weights


def test_weights_are_counted_without_loading_them(tmp_path: Path) -> None:
    """Tied weights are counted once, and no file of weights is needed."""
    model = tiny.model(layers=2)
    tiny.save(model, tiny.tokenizer(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert count_weights(StudentConfig(model=str(tmp_path))) == expected


JITTER = {
    "phimoe": {"input_jitter_noise": 0.1},  # its router has noise by default
    "mixtral": {"router_jitter_noise": 0.1},
    "dbrx": {"moe_jitter_eps": 0.1},
    "rwkv": {"num_hidden_layers": 3, "rescale_every": 1},
}


@pytest.mark.filterwarnings("default")  # those of the model's own code
@pytest.mark.parametrize("kind", JITTER)
def test_training_computes_what_evaluation_computes(kind: str, tmp_path: Path) -> None:
    config = make_tiny_config(CONFIG_MAPPING[kind], kind)
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        for name, value in JITTER[kind].items():
            if hasattr(part, name):
                setattr(part, name, value)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ids = torch.arange(12)[None]

    def logits(model: Any) -> list[torch.Tensor]:
        return [model.train(mode)(input_ids=ids, use_cache=False).logits for mode in (False, True)]

    with torch.no_grad():
        noisy = logits(AutoModelForCausalLM.from_pretrained(tmp_path))
        model = load_model(StudentConfig(model=str(tmp_path)))
        weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        evaluated, trained = logits(model)
    assert torch.equal(evaluated, trained)
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    assert not torch.equal(*noisy)
    # RWKV's evaluation rounds other numbers; training does not rescale.
    torch.testing.assert_close(evaluated, noisy[1 if kind == "rwkv" else 0])


@pytest.mark.parametrize("told", [False, True])
def test_the_auxiliary_loss_of_routers_is_not_trained_on(
    told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Qwen3MoeConfig(**SHAPE, **EXPERTS, output_router_logits=told)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    load_model(StudentConfig(model=str(tmp_path)))
    messages = [record.getMessage() for record in caplog.records]
    assert sum("router_aux_loss_coef 0.001" in message for message in messages) == told

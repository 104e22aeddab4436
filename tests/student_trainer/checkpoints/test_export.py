"""Exports are written layer by layer, with the bytes of `save_pretrained`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

from clients.config.tables.common import StudentConfig
from protos.errors import InvalidInput
from student_trainer.checkpoints import model_directory
from student_trainer.checkpoints.export import export_model
from student_trainer.model.loading import load_model
from student_trainer.parallel.collectives import make_accelerator, raise_on_all_ranks
from student_trainer.teachers.anchor import Anchor
from tests.forks import Forks
from tests.student_trainer import tiny
from tests.student_trainer.model.test_student import untied
from tests.student_trainer.saving import save_checkpoint
from tests.student_trainer.teachers.anchors import LIMIT, spread_student


def mixture() -> Any:
    """A mixture of experts: transformers stacks experts in memory and stores them one by one."""
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=13,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config)


def model_with_buffer() -> Any:
    model = tiny.model(seed=4, layers=2)
    model.get_decoder().register_buffer("counts", torch.arange(5))
    return model


MODELS = {
    "tied": lambda: tiny.model(seed=6, layers=11),
    "untied": lambda: untied(bias=True),
    "mixture": mixture,
    "buffer": model_with_buffer,
}


def weights_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("*.safetensors*")}


def tensors_of(path: Path) -> dict[str, list[Any]]:
    files = [load_file(file) for file in path.glob("*.safetensors")]
    return {name: weight.tolist() for file in files for name, weight in file.items()}


def round_weights(model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return all weights in `dtype`; names that share a tensor still share it."""
    rounded_weights = {
        id(weight): weight.to(dtype) if weight.is_floating_point() else weight
        for weight in model.state_dict(keep_vars=True).values()
    }
    return {
        name: rounded_weights[id(weight)]
        for name, weight in model.state_dict(keep_vars=True).items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("files", ["one", "several"])
@pytest.mark.parametrize("name", MODELS)
def test_the_bytes_of_save_pretrained(
    tmp_path: Path, name: str, files: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    max_file_bytes = 50_000_000_000 if files == "one" else 6000
    monkeypatch.setattr(model_directory, "_MAX_FILE_BYTES", max_file_bytes)
    model = MODELS[name]()
    model.save_pretrained(
        tmp_path / "expected", state_dict=round_weights(model, dtype), max_shard_size=max_file_bytes
    )
    export_model(tmp_path / "found", model=model, tokenizer=tiny.tokenizer(), dtype=dtype)
    exported, expected = weights_of(tmp_path / "found"), weights_of(tmp_path / "expected")
    if (name, files) == ("mixture", "several"):
        # transformers splits views of one tensor into files differently from separate tensors.
        assert tensors_of(tmp_path / "found") == tensors_of(tmp_path / "expected")
    else:
        assert exported == expected
    assert (len(exported) > 2) == (files == "several")


@pytest.mark.parametrize("name", ["tied", "untied", "buffer"])
def test_a_checkpoint_names_its_weights_as_save_pretrained_does(tmp_path: Path, name: str) -> None:
    model = MODELS[name]()
    model.save_pretrained(tmp_path / "expected")
    path = save_checkpoint(
        tmp_path,
        1,
        model=model,
        tokenizer=tiny.tokenizer(),
        optimizer=torch.optim.AdamW(model.parameters()),
    )
    expected = {file.name: file.read_bytes() for file in (tmp_path / "expected").iterdir()}
    checkpoint_files = {file.name: file.read_bytes() for file in (path / "model").iterdir()}
    expected_config = json.loads(expected.pop("config.json"))
    assert expected_config.items() <= json.loads(checkpoint_files["config.json"]).items()
    assert expected.items() <= checkpoint_files.items()


def test_a_mixture_is_resumed_and_exported_as_before(tmp_path: Path) -> None:
    """Checkpoints have stacked experts, exports the published format, also after a resume."""
    words = tiny.tokenizer()
    base = tiny.save(mixture(), words, tmp_path / "base")
    model = load_model(StudentConfig(model=str(base)))
    optimizer = torch.optim.AdamW(model.parameters())
    path = save_checkpoint(tmp_path, 1, model=model, tokenizer=words, optimizer=optimizer)
    resumed = load_model(StudentConfig(model=str(base)), path / "model")
    for weight, resumed_weight in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(weight, resumed_weight)
    for name, exported in (("before", model), ("after", resumed)):
        export_model(tmp_path / name, model=exported, tokenizer=words)
    assert weights_of(tmp_path / "before") == weights_of(tmp_path / "after") == weights_of(base)


def export_sharded(root: Path) -> None:
    """Export sharded weights; only the main process writes."""
    student = spread_student(tiny.model(seed=2, layers=2), "fsdp2")
    main = os.environ.get("RANK", "0") == "0"
    model, words = student.trained.model, tiny.tokenizer()
    export_model(root / "export", model=model, tokenizer=words, dtype=torch.bfloat16, main=main)


def test_processes_export_what_one_does(tmp_path: Path) -> None:
    model = tiny.model(seed=2, layers=2)
    model.save_pretrained(tmp_path / "expected", state_dict=round_weights(model, torch.bfloat16))
    assert Forks(3, tmp_path / "group", export_sharded, tmp_path).wait() == [0] * 3
    assert weights_of(tmp_path / "export") == weights_of(tmp_path / "expected")


def export_overflow(root: Path) -> None:
    """Export a student and its anchor as the trainer does, with a weight beyond float16."""
    accelerator = make_accelerator(LIMIT)
    student = spread_student(tiny.model(seed=2, layers=2), "fsdp2")
    anchor = Anchor(student, tau=0.5, update_period=1)
    model, words = student.trained.model, tiny.tokenizer()
    with torch.no_grad():
        model.model.norm.weight.fill_(1e5)

    def export(dtype: torch.dtype) -> None:
        export_model(
            root / "export",
            model=model,
            tokenizer=words,
            anchor=anchor,
            dtype=dtype,
            main=accelerator.is_main_process,
        )

    with pytest.raises(InvalidInput, match=r"norm\.weight has a value above 65504"):
        raise_on_all_ranks(accelerator, lambda: export(torch.float16))
    raise_on_all_ranks(accelerator, lambda: export(torch.bfloat16))


def test_processes_agree_on_an_overflow(tmp_path: Path) -> None:
    assert Forks(2, tmp_path / "group", export_overflow, tmp_path).wait() == [0] * 2
    for path in (tmp_path / "export", tmp_path / "export" / "anchor"):
        weights = load_file(path / "model.safetensors")
        assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


MEASURE = """
import resource, sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, Qwen3Config
from student_trainer.checkpoints.export import export_model
from tests.student_trainer import tiny
layers, width = 24, 256
config = Qwen3Config(vocab_size=64, hidden_size=width, intermediate_size=16 * width,
    num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4, head_dim=64)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
total = sum(p.nbytes for p in model.parameters())
words = tiny.tokenizer()
tiny.save(tiny.model(), words, Path(sys.argv[1]) / "warm")  # what is imported when one writes
export_model(Path(sys.argv[1]) / "first", model=tiny.model(), tokenizer=words)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export_model(Path(sys.argv[1]) / "export", model=model, tokenizer=words, dtype=torch.bfloat16)
print(total, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.slow
def test_an_export_needs_the_memory_of_a_layer(tmp_path: Path) -> None:
    """A bfloat16 copy of all weights would need half of their size; one layer needs a 48th."""
    measurement = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    total, added_bytes = map(int, measurement.stdout.split())
    print(
        f"{total / 1e6:.0f} MB of weights, {added_bytes / 1e6:.1f} MB more while they are exported"
    )
    assert added_bytes < total / 8


def save_deepseek(path: Path, *, next_token_layer: bool) -> Path:
    """Save a tiny deepseek_v3 whose config.json counts a layer that transformers ignores."""
    torch.manual_seed(3)
    config = DeepseekV3Config(
        vocab_size=13,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        num_nextn_predict_layers=1,
    )
    model = AutoModelForCausalLM.from_config(config)
    biases = torch.tensor([4.9916, 5.0009, 4.9933, 5.0021])
    model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(biases)
    tiny.save(model, tiny.tokenizer(), path)
    if next_token_layer:
        weights = load_file(path / "model.safetensors")
        layer = {"model.layers.2.eh_proj.weight": torch.randn(4, 8).bfloat16()}
        save_file({**weights, **layer}, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("is_resumed", [False, True])
def test_layers_that_transformers_ignores_are_carried_over(
    tmp_path: Path, is_resumed: bool
) -> None:
    """A checkpoint has not got them, and does not count them; the export of a resumed run has."""
    student = save_deepseek(tmp_path / "student", next_token_layer=True)
    model, words = load_model(StudentConfig(model=str(student))), tiny.tokenizer()
    if is_resumed:
        optimizer = torch.optim.AdamW(model.parameters())
        path = save_checkpoint(tmp_path, 1, model=model, tokenizer=words, optimizer=optimizer)
        config = json.loads((path / "model" / "config.json").read_text())
        assert config["num_nextn_predict_layers"] == 0
        model = load_model(StudentConfig(model=str(student)), path / "model")
    export_model(tmp_path / "export", model=model, tokenizer=words, source=student)
    name = "model.layers.2.eh_proj.weight"
    weights = load_file(tmp_path / "export" / "model.safetensors")
    assert torch.equal(weights[name], load_file(student / "model.safetensors")[name])
    assert weights.keys() == load_file(student / "model.safetensors").keys()
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1


def test_layers_that_are_nowhere_are_not_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    student = save_deepseek(tmp_path / "student", next_token_layer=False)
    model = load_model(StudentConfig(model=str(student)))
    export_model(tmp_path / "export", model=model, tokenizer=tiny.tokenizer(), source=student)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0
    assert "no layers for num_nextn_predict_layers = 1" in caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_transformers_keeps_in_float32_is_not_rounded(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """Router biases that differ by less than a half-precision number; also the anchor's."""
    student = save_deepseek(tmp_path / "student", next_token_layer=False)
    model = load_model(StudentConfig(model=str(student)))
    anchor = Anchor(spread_student(model), tau=0.5, update_period=1)
    export_model(
        tmp_path / "export",
        model=model,
        tokenizer=tiny.tokenizer(),
        source=student,
        anchor=anchor,
        dtype=dtype,
    )
    original = load_file(student / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(student, dtype=dtype).state_dict()
    names_in_float32 = {name for name, weight in loaded.items() if weight.dtype == torch.float32}
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in names_in_float32
    for path in (tmp_path / "export", tmp_path / "export" / "anchor"):
        weights = load_file(path / "model.safetensors")
        float32_names = {name for name, weight in weights.items() if weight.dtype == torch.float32}
        assert float32_names == names_in_float32
        assert all(torch.equal(weights[name], original[name]) for name in float32_names)
        loaded = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).state_dict()
        assert all(torch.equal(loaded[name], original[name]) for name in float32_names)

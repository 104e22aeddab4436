"""Exports are the same model in transformers 4 and 5, with the student's own tokenizer files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from clients.config.tables.common import StudentConfig
from protos.errors import WrongState
from student_trainer.checkpoints.atomic_directory import is_intact
from student_trainer.checkpoints.checkpoint import checkpoint_path, collect_contents
from student_trainer.checkpoints.export import export_model
from student_trainer.checkpoints.model_directory import (
    check_same_tokenizer,
    collect_small_files,
    read_source_files,
)
from student_trainer.checkpoints.saver import Saver
from student_trainer.model.loading import load_model, load_tokenizer, local_directory
from student_trainer.parallel.collectives import make_accelerator
from tests.student_trainer import tiny
from tests.student_trainer.checkpoints import transformers_4
from tests.student_trainer.saving import LIMIT

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.5,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
YARN = {"rope_type": "yarn", "rope_theta": 70.0, "factor": 4.0, "attention_factor": 1.5}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.5] * 8,
    "long_factor": [4.0] * 8,
}
BY_LAYER_TYPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 90.0, "factor": 3.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
THETA = {"rope_type": "default", "rope_theta": 50.0}
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"rope_parameters": THETA}),
    "qwen3": ("qwen3", {"rope_parameters": THETA, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 yarn": ("qwen3", {"rope_parameters": YARN, "head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {"rope_parameters": THETA, "head_dim": 16, **EXPERTS}),
    "llama": ("llama", {"rope_parameters": LLAMA_3}),
    "mistral": ("mistral", {"rope_parameters": THETA}),
    "phi": ("phi", {"rope_parameters": {**THETA, "partial_rotary_factor": 0.5}}),
    "phi3": (
        "phi3",
        {
            "rope_parameters": LONG,
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 256,
        },
    ),
    "glm4": (
        "glm4",
        {"rope_parameters": {**THETA, "partial_rotary_factor": 0.5}, "head_dim": 16},
    ),
    "gpt_neox": ("gpt_neox", {"rope_parameters": {**THETA, "partial_rotary_factor": 0.5}}),
    "gemma2": ("gemma2", {"rope_parameters": THETA, "head_dim": 16}),
    "gemma3": (
        "gemma3_text",
        {
            "rope_parameters": BY_LAYER_TYPE,
            "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "olmo2": ("olmo2", {"rope_parameters": THETA}),
    "granite": ("granite", {"rope_parameters": THETA}),
    "smollm3": ("smollm3", {"rope_parameters": THETA}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
}
CONTROL = ("<|im_end|>", "<|tool|>")


def control_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with two more special tokens, as it is saved by transformers 5."""
    words = tiny.tokenizer()
    words.add_special_tokens({"extra_special_tokens": [AddedToken(token) for token in CONTROL]})
    return words


def save_student(directory: Path, model_type: str, values: dict[str, Any]) -> Path:
    torch.manual_seed(5)
    config = AutoConfig.for_model(model_type, **{**SIZES, **values})
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    control_tokenizer().save_pretrained(directory)
    return directory


def export(student: Path, path: Path) -> Path:
    config = StudentConfig(model=str(student))
    export_model(
        path,
        model=load_model(config),
        tokenizer=load_tokenizer(config),
        source=local_directory(config),
    )
    return path


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def as_transformers_4(directory: Path, rope_theta: float) -> None:
    """Give a model directory the entries that transformers 4 writes."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"], config["dtype"]
    config |= {"rope_theta": rope_theta, "rope_scaling": None, "torch_dtype": "bfloat16"}
    file.write_text(json.dumps(config))
    file = directory / "tokenizer_config.json"
    tokenizer_config = json.loads(file.read_text())
    del tokenizer_config["extra_special_tokens"]
    tokenizer_config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": list(CONTROL),
    }
    file.write_text(json.dumps(tokenizer_config))


def add_own_head(directory: Path) -> None:
    """Put a head beside the embeddings of a tied model, whose config.json still says tied."""
    file = directory / "model.safetensors"
    weights = load_file(file)
    head = torch.randn(
        weights["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(1)
    )
    save_file({**weights, "lm_head.weight": head}, file, {"format": "pt"})


def test_the_names_of_both_versions(tmp_path: Path) -> None:
    """A student of transformers 4 keeps its entries; one of 5 gets the old names too."""
    for saved_by in (4, 5):
        student = save_student(tmp_path / f"student-{saved_by}", *TYPES["qwen3"])
        if saved_by == 4:
            as_transformers_4(student, 500_000.0)
        path = export(student, tmp_path / f"export-{saved_by}")
        config = json.loads((path / "config.json").read_text())
        theta = 500_000.0 if saved_by == 4 else 50.0
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == theta
        assert config.get("rope_scaling") is None
        assert config["dtype"] == config["torch_dtype"] == "float32"
        tokenizer_config = json.loads((path / "tokenizer_config.json").read_text())
        assert tokenizer_config["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert tokenizer_config["additional_special_tokens"] == list(CONTROL)
        assert (path / "tokenizer.json").read_bytes() == (student / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("name", "theta", "scaling"),
    [
        ("phi3", 100.0, {"type": "longrope", "short_factor": [1.5] * 8, "long_factor": [4.0] * 8}),
        ("gemma3", 90.0, {"rope_type": "linear", "factor": 3.0}),
    ],
)
def test_rotary_embeddings_by_the_names_of_version_4(
    name: str, theta: float, scaling: dict[str, Any], tmp_path: Path
) -> None:
    path = export(save_student(tmp_path / "student", *TYPES[name]), tmp_path / "export")
    config = json.loads((path / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]) == (theta, scaling)


def test_every_small_file_of_the_student_is_carried_over(tmp_path: Path) -> None:
    student = save_student(tmp_path / "student", *TYPES["qwen3"])
    (student / "additional_chat_templates").mkdir()
    files = {
        "additional_chat_templates/tool_use.jinja": "{{ tools }}",
        "chat_template.jinja": "{{ messages }}",
        "special_tokens_map.json": "{}",
        "video_preprocessor_config.json": "{}",
        "vocab.json": "{}",
    }
    others = {"anchor/config.json": "{}", "notes.md": "", ".hidden.json": "{}", "code.py": ""}
    (student / "anchor").mkdir()
    for name, text in {**files, **others}.items():
        (student / name).write_text(text)
    path = export(student, tmp_path / "export")
    assert {name: (path / name).read_text() for name in files} == files
    assert not [name for name in others if (path / name).exists()]


@pytest.mark.parametrize("change", ["edited", "deleted"])
def test_an_export_has_the_tokenizer_and_configuration_of_the_start(
    tmp_path: Path, change: str
) -> None:
    student = save_student(tmp_path / "student", *TYPES["qwen3"])
    config = StudentConfig(model=str(student))
    model, tokenizer = load_model(config), load_tokenizer(config)
    expected = export(student, tmp_path / "expected")
    source_files = read_source_files(student, tokenizer.chat_template)
    if change == "deleted":
        shutil.rmtree(student)
    else:
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            (student / name).write_text('{"edited": true}')
        (student / "chat_template.jinja").write_text("edited")
    export_model(
        tmp_path / "export",
        model=model,
        tokenizer=tokenizer,
        source=student,
        source_files=source_files,
    )
    assert files_of(tmp_path / "export") == files_of(expected)


def test_a_run_is_not_resumed_with_another_tokenizer(tmp_path: Path) -> None:
    student = save_student(tmp_path / "student", *TYPES["qwen3"])
    tokenizer = load_tokenizer(StudentConfig(model=str(student)))
    checkpoint = export(student, tmp_path / "checkpoint")
    check_same_tokenizer(checkpoint, read_source_files(student, tokenizer.chat_template))
    text = (student / "tokenizer.json").read_text()
    (student / "tokenizer.json").write_text(text.replace('"<|', '"<||', 1))
    with pytest.raises(WrongState, match=r"student\.model: tokenizer\.json differs from the file"):
        check_same_tokenizer(checkpoint, read_source_files(student, tokenizer.chat_template))


def test_a_head_of_its_own_is_not_tied(tmp_path: Path) -> None:
    """The student's config.json says tied, and transformers 4 would drop the head."""
    student = save_student(tmp_path / "student", *TYPES["qwen3"])
    add_own_head(student)
    path = export(student, tmp_path / "export")
    assert json.loads((path / "config.json").read_text())["tie_word_embeddings"] is False
    assert "lm_head.weight" in load_file(path / "model.safetensors")


def test_a_student_that_is_an_export_has_intact_checkpoints_and_exports(tmp_path: Path) -> None:
    """Its manifest.json lists the files of the earlier job, and is not carried over."""
    student = export(save_student(tmp_path / "student", *TYPES["qwen3"]), tmp_path / "first")
    config = StudentConfig(model=str(student))
    model = load_model(config)
    small_files = collect_small_files(
        model, load_tokenizer(config), read_source_files(student, None)
    )
    saver = Saver(make_accelerator(LIMIT), tmp_path, small_files=small_files)
    saver.save(1, collect_contents(model, torch.optim.AdamW(model.parameters())), None)
    saver.finish()
    assert is_intact(checkpoint_path(tmp_path, 1))
    assert is_intact(export(student, tmp_path / "second"))


@pytest.mark.slow
def test_transformers_4_reads_the_same_model(tmp_path: Path) -> None:
    """Logits and tokens of every export are those of transformers 5."""
    packages = transformers_4.install()
    exports = {}
    for name, (model_type, values) in TYPES.items():
        student = save_student(tmp_path / "student" / name, model_type, values)
        exports[name] = export(student, tmp_path / "export" / name)
    headed = save_student(tmp_path / "student" / "own head", *TYPES["qwen3"])
    add_own_head(headed)
    exports["own head"] = export(headed, tmp_path / "export" / "own head")
    exports["again"] = export(exports["llama"], tmp_path / "export" / "again")
    results = transformers_4.read(packages, tmp_path / "results", list(exports.values()))
    for name, path in exports.items():
        expected = transformers_4.read_directory(path)
        error = (results[f"{path}/logits"] - expected["logits"]).abs().max()
        print(f"{name:12} {float(error):.1e}")
        tokenizer = load_tokenizer(StudentConfig(model=str(path)))
        assert results[f"{path}/ids"].tolist() == tokenizer(transformers_4.TEXT)["input_ids"], name
        assert tokenizer.all_special_tokens[-2:] == list(CONTROL)
        torch.testing.assert_close(
            results[f"{path}/logits"], expected["logits"], atol=1e-4, rtol=1e-4, msg=name
        )

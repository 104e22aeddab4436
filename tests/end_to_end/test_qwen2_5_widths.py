"""Qwen2.5 7B teaches 1.5B: the real tokenizer and vocabulary sizes, tiny layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.forked_teacher import ForkedTeacher
from tests.end_to_end.forked_trainer import finish
from tests.end_to_end.processes import metrics_of, new_run
from tests.real_tokenizers import fetch_tokenizer

TOKENS = 151_665
WIDTHS = {"7b": 152_064, "1.5b": 151_936}  # as in their config.json


@pytest.fixture(scope="module")
def models_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    models_directory = tmp_path_factory.mktemp("qwen")
    tokenizer = AutoTokenizer.from_pretrained(
        fetch_tokenizer("qwen2_5", models_directory / "tokenizer")
    )
    assert len(tokenizer) == TOKENS
    for seed, (name, width) in enumerate(WIDTHS.items()):
        torch.manual_seed(seed)
        config = Qwen2Config(
            vocab_size=width,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=4096,
            tie_word_embeddings=name == "1.5b",
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
        model = Qwen2ForCausalLM(config)
        with torch.no_grad():
            model.get_output_embeddings().weight.normal_(std=0.3)
        model.save_pretrained(models_directory / name)
        tokenizer.save_pretrained(models_directory / name)
    prompts = [f"How many apples are {n} apples and {n + 1} apples?" for n in range(24)]
    lines = [json.dumps({"prompt": text, "answer": "some"}) + "\n" for text in prompts]
    (models_directory / "prompts.jsonl").write_text("".join(lines))
    return models_directory


@pytest.mark.slow
@pytest.mark.parametrize("student", ["1.5b", "7b"])
@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
def test_one_teaches_the_other(
    models_directory: Path, tmp_path: Path, student: str, divergence: str
) -> None:
    """In both directions the KL falls. The teacher would refuse any padding id."""
    from tests.student_trainer import tiny

    (teacher,) = WIDTHS.keys() - {student}
    material = tiny.Material(
        models_directory / "prompts.jsonl", models_directory / teacher, models_directory / student
    )
    process = ForkedTeacher(
        ["--model", str(models_directory / teacher), "--no-cache", "--device", "cpu"],
        log=tmp_path / "teacher.log",
    )
    try:
        config: Any = tiny.job(
            material,
            process.address,
            max_steps=8,
            eval__every=8,
            eval__metric="none",
            checkpoint__every=8,
            train__learning_rate=2e-2,
            method__divergence=divergence,
            method__max_prompt_tokens=64,
        )
        run = finish(new_run(tmp_path / "run", config))
    finally:
        process.close()
    lines = metrics_of(run)
    print(f"{student} {divergence}: KL {lines[0]['eval/kl']:.3f} -> {lines[-1]['eval/kl']:.3f}")
    assert lines[-1]["eval/kl"] < 0.95 * lines[0]["eval/kl"]

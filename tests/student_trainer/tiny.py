"""Random models with the characters of an addition as vocabulary, and jobs for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from clients.config.offline import OfflineJob
from clients.config.on_policy import OnPolicyJob
from clients.config.rl import RLJob
from clients.config.sft import SFTJob
from student_trainer.data.prompts import Prompt
from student_trainer.tools import addition
from student_trainer.tools.pretrain import make_model, make_tokenizer

ALPHABET = "0123456789+="
PROMPTS = 600  # as many as a usual test uses, as every attempt encodes all


@dataclass(frozen=True)
class Material:
    """Files of a job: prompts, and a teacher and a student with one tokenizer."""

    prompts: Path
    teacher: Path
    student: Path

    @classmethod
    def at(cls, root: Path) -> Material:
        return cls(root / "data" / "train.jsonl", root / "teacher", root / "student")


def prompt(*ids: int, answer: str = "") -> Prompt:
    return Prompt(np.array(ids, dtype=np.int32), answer)


def tokenizer(characters: str = ALPHABET) -> PreTrainedTokenizerFast:
    return make_tokenizer("characters", [characters], 0)


def model(
    *, seed: int = 0, layers: int = 1, spread: float = 0.5, characters: str = ALPHABET
) -> Qwen3ForCausalLM:
    """Return a random model; `spread`: standard deviation of the tied embeddings."""
    torch.manual_seed(seed)
    words = tokenizer(characters)
    student = make_model(len(words), words, layers, 32).eval()
    with torch.no_grad():
        student.get_input_embeddings().weight.normal_(std=spread)
    return student


def save(saved_model: Any, words: PreTrainedTokenizerFast, path: Path) -> Path:
    saved_model.save_pretrained(path)
    words.save_pretrained(path)
    return path


def save_material(root: Path) -> Material:
    material = Material.at(root)
    addition.write(material.prompts.parent, seed=0)
    lines = material.prompts.read_text().splitlines(keepends=True)
    material.prompts.write_text("".join(lines[:PROMPTS]))
    save(model(seed=1, layers=2), tokenizer(), material.teacher)
    save(model(seed=2, spread=0.2), tokenizer(), material.student)
    return material


def job(material: Material, address: str = "localhost:1", **changes: Any) -> OnPolicyJob:
    """Return a job of a few seconds. `train__processes=2` sets train.processes."""
    values: dict[str, Any] = {
        "student": {"model": str(material.student)},
        "teacher": {"address": address, "top_k": 4},
        "data": {"path": str(material.prompts)},
        "max_steps": 60,
        "method": {"max_prompt_tokens": 16, "max_new_tokens": 6},
        "train": {
            "learning_rate": 3e-3,
            "schedule": "cosine",
            "warmup_steps": 5,
            "prompts_per_step": 8,
            "tokens_per_micro_batch": 48,
        },
        "eval": {"every": 10, "prompts": 8, "metric": "exact_match"},
        "checkpoint": {"every": 4},
        "track": {"tensorboard": False},
    }
    values = _apply_changes(values, changes)
    if "teachers" in values:
        values["teacher"].pop("address", None)  # refused beside `teachers`
    return OnPolicyJob.model_validate(values)


def offline_job(material: Material, store: Path, **changes: Any) -> OfflineJob:
    """Return the same job with a store."""
    defaults = job(material)
    values: dict[str, Any] = {
        "student": {"model": str(material.student)},
        "data": {"path": str(store)},
        "max_steps": defaults.max_steps,
        "method": {"type": "offline"},
        "train": defaults.train.model_dump(),
        "eval": {"every": 10, "prompts": 8},
        "checkpoint": {"every": 4},
        "track": {"tensorboard": False},
    }
    values = _apply_changes(values, changes)
    if values["method"].get("on_policy_fraction") or values["eval"].get("metric", "none") != "none":
        values["method"].setdefault("max_new_tokens", 6)  # refused in a job that samples nothing
    return OfflineJob.model_validate(values)


def sft_job(material: Material, **changes: Any) -> SFTJob:
    """Return the same job with the answers of the data and without a teacher."""
    defaults = job(material)
    values: dict[str, Any] = {
        "student": {"model": str(material.student)},
        "data": {"path": str(material.prompts)},
        "max_steps": defaults.max_steps,
        "method": {"type": "sft", "max_tokens": 24},
        "train": defaults.train.model_dump(),
        "eval": {"every": 10, "prompts": 8},
        "checkpoint": {"every": 4},
        "track": {"tensorboard": False},
    }
    return SFTJob.model_validate(_apply_changes(values, changes))


def rl_job(material: Material, **changes: Any) -> RLJob:
    """Return an RL job that rewards answers with a 1, which a random student sometimes writes.
    Each step has two updates of the student and one of the anchor.
    """
    defaults = job(material)
    values: dict[str, Any] = {
        "student": {"model": str(material.student)},
        "data": {"path": str(material.prompts)},
        "reward": {"type": "regex", "pattern": "1"},
        "anchor": {"tau": 0.8, "update_period": 2},
        "max_steps": 12,
        "method": {
            "type": "rl",
            "beta": 0.2,
            "top_k": 4,
            "rollouts_per_prompt": 4,
            "updates_per_step": 2,
            "max_prompt_tokens": 16,
            "max_new_tokens": 6,
            "temperature": 5.0,
        },
        "train": defaults.train.model_dump(),
        "eval": {"every": 4, "prompts": 8, "metric": "exact_match"},
        "checkpoint": {"every": 4},
        "track": {"tensorboard": False},
    }
    values = _apply_changes(values, changes)
    if not values["method"]["beta"]:
        del values["anchor"]  # refused in a job without an anchor
    return RLJob.model_validate(values)


def _apply_changes(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in changes.items():
        *tables, key = name.split("__")
        table = values
        for inner in tables:
            table = table.setdefault(inner, {})
        table[key] = value
    return values


TIMES = ("time/", "tokens_per_sec", "memory/")


def curve(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the metrics that must not depend on the machine, the attempt or the clock."""
    return [
        {name: v for name, v in line.items() if name != "attempt" and not name.startswith(TIMES)}
        for line in lines
    ]

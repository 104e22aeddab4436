from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clients.config import DataConfig
from clients.exam_config import ExamConfig
from clients.reward_config import RewardConfig
from student_trainer.tasks import addition
from tests.trainer import tiny

# A random model begins with a digit now and then; more often it says its prompt's last character.
PATTERN = r"^\d"


@dataclass(frozen=True)
class Material:
    """A model of many opinions, and prompts for it."""

    model: Path
    prompts: Path


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    root = tmp_path_factory.mktemp("exam")
    addition.write(root, seed=0)
    tiny.save(tiny.model(seed=1, layers=2, spread=0.07), tiny.tokenizer(), root / "model")
    return Material(root / "model", root / "heldout.jsonl")


def exam(material: Material, out: Path, **changes: Any) -> ExamConfig:
    """10 prompts, 24 answers of two tokens each."""
    values: dict[str, Any] = {
        "models": {"tiny": str(material.model)},
        "out": str(out),
        "reward": RewardConfig(type="regex", pattern=PATTERN),
        "data": DataConfig(path=str(material.prompts)),
        "prompts": 10,
        "samples": 24,
        "temperature": 0.8,
        "top_p": 0.6,
        "max_tokens": 2,
        "seed": 0,
        "endpoint": None,
        "api": "completions",
        "in_flight": 8,
        "patience_seconds": 60.0,
    }
    return ExamConfig(**{**values, **changes})

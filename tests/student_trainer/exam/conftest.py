from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clients.config.evaluation import EvalMethod, ExamConfig
from clients.config.tables.data import DataConfig
from clients.config.tables.reward import RewardConfig
from tests.student_trainer import tiny


@dataclass(frozen=True)
class Material:
    """A random model whose answers vary, and prompts for it."""

    model: Path
    prompts: Path


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    root = tmp_path_factory.mktemp("exam")
    # The model is random, and often says the last character of its prompt again.
    lines = [json.dumps({"prompt": f"{n}+{n}=", "answer": "=="}) for n in range(30)]
    (root / "prompts.jsonl").write_text("\n".join(lines))
    tiny.save(tiny.model(seed=1, layers=2, spread=0.07), tiny.tokenizer(), root / "model")
    return Material(root / "model", root / "prompts.jsonl")


def exam(material: Material, out: Path, **changes: Any) -> ExamConfig:
    """Return the settings of an evaluation: 10 prompts, 24 answers of two tokens each."""
    values: dict[str, Any] = {
        "models": {"tiny": str(material.model)},
        "out": str(out),
        "reward": RewardConfig(type="exact_match"),
        "data": DataConfig(path=str(material.prompts)),
        "seed": 0,
        "endpoint": None,
        "api": "completions",
        "in_flight": 8,
        "patience_seconds": 60.0,
    }
    method = {"type": "eval", "prompts": 10, "samples": 24, "top_p": 0.6, "max_new_tokens": 2}
    method |= {key: changes.pop(key) for key in [*changes] if key in EvalMethod.model_fields}
    return ExamConfig(**{**values, "method": method, **changes})

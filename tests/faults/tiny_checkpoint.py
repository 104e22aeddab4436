"""Checkpoints of a model of a few numbers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.student_trainer import tiny
from tests.student_trainer.saving import save_checkpoint


@cache
def material() -> tuple[Any, Any, torch.optim.Optimizer]:
    model = tiny.model()
    return model, tiny.tokenizer(), torch.optim.AdamW(model.parameters())


def save(root: Path, step: int) -> None:
    model, tokenizer, optimizer = material()
    save_checkpoint(root, step, model=model, tokenizer=tokenizer, optimizer=optimizer)

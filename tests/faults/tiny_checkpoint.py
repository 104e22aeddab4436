"""Checkpoints of a model of a few numbers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from student_trainer.loop import checkpoint
from tests.student_trainer import tiny


@cache
def material() -> tuple[Any, Any, torch.optim.Optimizer]:
    model = tiny.model()
    return model, tiny.tokenizer(), torch.optim.AdamW(model.parameters())


def save(root: Path, step: int) -> None:
    model, tokenizer, optimizer = material()
    checkpoint.save_checkpoint(root, step, model=model, tokenizer=tokenizer, optimizer=optimizer)

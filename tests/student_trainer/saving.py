"""Saving of checkpoints by all processes of a group, or by one."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from student_trainer.checkpoints.checkpoint import checkpoint_path, collect_contents
from student_trainer.checkpoints.model_directory import collect_small_files
from student_trainer.checkpoints.saver import Saver
from student_trainer.critic import CriticAdvantages
from student_trainer.parallel.collectives import make_accelerator
from student_trainer.teachers.anchor import Anchor

LIMIT = timedelta(minutes=10)


def saver_of(root: Path, model: Any, tokenizer: Any, **options: Any) -> Saver:
    accelerator = make_accelerator(LIMIT)
    small_files = collect_small_files(model, tokenizer, None)
    return Saver(accelerator, root, small_files=small_files, **options)


def save_checkpoint(
    root: Path,
    step: int,
    *,
    model: Any,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer,
    anchor: Anchor | None = None,
    values: CriticAdvantages | None = None,
    facts: Mapping[str, str] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> Path:
    """Save, wait until it is written, and return its directory."""
    saver = saver_of(root, model, tokenizer, facts=facts)
    saver.save(step, collect_contents(model, optimizer, anchor, values), metrics)
    saver.finish()
    return checkpoint_path(root, step)

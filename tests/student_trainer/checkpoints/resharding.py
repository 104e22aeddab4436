"""A run of updates that any number of processes can continue, and its expected checkpoint files.

`write_expected` writes checkpoints in one process with transformers and safetensors alone.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from clients.config.tables.common import LoraConfig, StudentConfig
from student_trainer.checkpoints import checkpoint
from student_trainer.checkpoints.model_directory import collect_small_files
from student_trainer.model.loading import load_model
from student_trainer.parallel.shards import local, own_slices
from student_trainer.teachers.anchor import Anchor
from tests.forks import Forks
from tests.student_trainer import tiny
from tests.student_trainer.saving import save_checkpoint
from tests.student_trainer.teachers.anchors import spread_student

TAU, PERIOD = 0.9, 2


def gradient(name: str, like: Tensor, update: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * update + sum(name.encode()))
    return torch.randn(like.shape, generator=generator)


def student_config(base: Path, adapted: bool) -> StudentConfig:
    lora = LoraConfig(rank=3, train_head=True) if adapted else None
    return StudentConfig(model=str(base), lora=lora)


def load_student(base: Path, adapted: bool, checkpoint_path: Path | None = None) -> Any:
    torch.manual_seed(7)  # new adapters
    return load_model(
        student_config(base, adapted), checkpoint_path / "model" if checkpoint_path else None
    )


def optimizer_of(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def update_once(model: Any, optimizer: torch.optim.Optimizer, anchor: Anchor, update: int) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).copy_(gradient(name, parameter, update)[own_slices(parameter)])
    optimizer.step()
    anchor.after_update()


def continue_run(
    root: Path,
    base: Path,
    adapted: bool,
    sharding: str,
    resumed_step: int | None,
    update: int,
    tensor_parallel: int,
) -> None:
    """Load the checkpoint of `resumed_step`, make one update, and save it as step `update`."""
    checkpoint_path = checkpoint.checkpoint_path(root, resumed_step) if resumed_step else None
    student = spread_student(
        load_student(base, adapted, checkpoint_path), sharding, tensor_parallel
    )
    model = student.trained.model
    optimizer = optimizer_of(model)
    anchor = Anchor(student, tau=TAU, update_period=PERIOD)
    if checkpoint_path is not None:
        checkpoint.load_optimizer(checkpoint_path, model, optimizer)
        checkpoint.load_anchor(checkpoint_path, anchor)
    update_once(model, optimizer, anchor, update)
    save_checkpoint(
        root, update, model=model, tokenizer=tiny.tokenizer(), optimizer=optimizer, anchor=anchor
    )


def run_processes(
    world: int,
    root: Path,
    base: Path,
    adapted: bool,
    sharding: str,
    update: int,
    tensor_parallel: int = 1,
) -> Path:
    """Run `continue_run` in `world` processes from the update before, and return the checkpoint."""
    resumed_step = update - 1 or None
    group = root.with_name(f"{root.name}-{update}.group")
    options = (adapted, sharding, resumed_step, update, tensor_parallel)
    forks = Forks(world, group, continue_run, root, base, *options)
    assert forks.wait() == [0] * world
    return checkpoint.checkpoint_path(root, update)


def write_expected(root: Path, base: Path, adapted: bool, updates: int) -> None:
    """Make the updates in this process, and write a checkpoint after each."""
    student = spread_student(load_student(base, adapted))
    model = student.trained.model
    optimizer = optimizer_of(model)
    anchor = Anchor(student, tau=TAU, update_period=PERIOD)
    for update in range(1, updates + 1):
        update_once(model, optimizer, anchor, update)
        _write_checkpoint(
            checkpoint.checkpoint_path(root, update), model, optimizer, anchor, update
        )


def _write_checkpoint(
    path: Path, model: Any, optimizer: torch.optim.Optimizer, anchor: Anchor, step: int
) -> None:
    path.mkdir(parents=True)
    if hasattr(model, "peft_config"):
        (path / "model").mkdir()
        model.peft_config["default"].save_pretrained(path / "model")
        save_file(_adapter_weights(model), path / "model" / "adapter_model.safetensors")
    else:
        model.save_pretrained(path / "model")
    for name, data in collect_small_files(model, tiny.tokenizer(), None).items():
        (path / "model" / name).write_bytes(data)
    moments = {
        f"{name}/{kind}": value
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }
    save_file(moments, path / "optimizer.safetensors")
    counts = json.dumps({"updates": anchor.updates, "version": anchor.version})
    save_file(anchor.state(), path / "anchor.safetensors", metadata={"counts": counts})
    (path / "state.json").write_text(json.dumps({"step": step}) + "\n")
    files = {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
    (path / "manifest.json").write_text(json.dumps({"files": digests}, indent=1) + "\n")


def _adapter_weights(model: Any) -> dict[str, Tensor]:
    """Return the adapter weights by peft's names; a tied head appears under both of its names."""
    return {
        "base_model.model." + name.replace(".default.", "."): parameter.detach().clone()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }

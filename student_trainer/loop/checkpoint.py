"""Checkpoints that a crash cannot spoil.

    checkpoints/step-000050/   model/ (a Hugging Face directory, or one of peft with the adapters)
                               optimizer.safetensors  anchor.safetensors, if there is an anchor,
                               critic.safetensors, if there is a critic
                               state.json  manifest.json (sha256 of the rest)

The tensors are whole however the student lay in its processes: any number of them can go on.

Everything is written into a directory of another name, synced, and renamed when it is whole; older
ones are deleted only then. A resume takes the newest one whose every byte is as the manifest says.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from clients.runs.directory import fsync_directory
from clients.runs.fence import require_unfenced
from protos.errors import Corrupt, InvalidInput, NotFound
from protos.rpc.failpoints import failpoint
from student_trainer.critic.advantages import CriticAdvantages
from student_trainer.model.lora import has_adapters, learned, merged, save_adapters
from student_trainer.parallel.sharding import share_of, whole_tensors
from student_trainer.teachers.anchor import Anchor

log = logging.getLogger(__name__)

_ANCHOR = "anchor.safetensors"
_CRITIC = "critic.safetensors"


def checkpoint_path(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


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
    main: bool = True,
) -> None:
    """Write the checkpoint of `step`; it appears as a whole or not at all.

    `facts`: what `facts_of` is to give back. Every process must call it, for its share of the
    tensors; the `main` one writes.
    """
    adapted = has_adapters(model)
    weights = learned(model) if adapted else model.state_dict(keep_vars=True)
    weights = whole_tensors(weights, keep=main)
    moments = whole_tensors(_optimizer_tensors(model, optimizer), keep=main)
    anchored = whole_tensors(anchor.state(), keep=main) if anchor is not None else {}

    def write(partial: Path) -> None:
        if adapted:
            save_adapters(partial / "model", model, weights)
        else:
            model.save_pretrained(partial / "model", state_dict=weights)
        tokenizer.save_pretrained(partial / "model")
        save_file(moments, partial / "optimizer.safetensors")
        if anchor is not None:
            counts = json.dumps({"updates": anchor.updates, "version": anchor.version})
            # One entry: several would be written in any order, and no two files be the same.
            save_file(anchored, partial / _ANCHOR, metadata={"counts": counts})
        if values is not None:
            save_file(values.state(), partial / _CRITIC)
        (partial / "state.json").write_text(json.dumps({"step": step, **(facts or {})}) + "\n")

    if main:
        write_whole(checkpoint_path(root, step), write)


def export_model(
    path: Path, *, model: Any, tokenizer: Any, anchor: Anchor | None = None, main: bool = True
) -> None:
    """Write the plain Hugging Face directory; adapters are merged, and beside it in `adapter/`.
    The anchor is written likewise, in `anchor/`.

    Every process must call it; the `main` one writes.
    """
    parameters = model.state_dict(keep_vars=True)
    weights = whole_tensors(parameters, keep=main)
    anchored: dict[str, Tensor] = {}
    if anchor is not None:
        anchored = whole_tensors(anchor.instead_of(parameters), keep=main)

    def write(partial: Path) -> None:
        _write_model(partial, model, weights, tokenizer)
        if anchor is not None:
            _write_model(partial / "anchor", model, anchored, tokenizer)

    if main:
        write_whole(path, write)


def _write_model(path: Path, model: Any, weights: Mapping[str, Tensor], tokenizer: Any) -> None:
    adapted = has_adapters(model)
    model.save_pretrained(path, state_dict=merged(model, weights) if adapted else weights)
    if adapted:
        save_adapters(path / "adapter", model, {name: weights[name] for name in learned(model)})
        # save_pretrained takes it from the frozen weights; the merged ones are float32.
        model.config.dtype = torch.float32
        model.config.save_pretrained(path)
    tokenizer.save_pretrained(path)


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a directory that then appears at `path`, with a manifest, in one rename.

    Raises WrongState when the attempt was given up, before it and after.
    """
    require_unfenced()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        failpoint("checkpoint-begun")
        write(partial)
        failpoint("checkpoint-filled")
        _seal(partial)
        failpoint("checkpoint-sealed")
        require_unfenced()
    except BaseException:  # a full disk, most likely: do not keep it full
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if path.exists():  # of an earlier attempt that went another way
        shutil.rmtree(path)
        failpoint("checkpoint-replaced")
    partial.rename(path)
    failpoint("checkpoint-renamed")
    fsync_directory(path.parent)


def _seal(partial: Path) -> None:
    """Add the manifest, and let nothing of it be only in memory."""
    manifest = {"files": {str(f.relative_to(partial)): _sha256(f) for f in _files(partial)}}
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    failpoint("checkpoint-listed")
    for file in _files(partial):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    for directory in (partial, *(d for d in partial.rglob("*") if d.is_dir())):
        fsync_directory(directory)


def delete_old(root: Path, keep: int, *, best: int | None = None) -> None:
    """Keep the newest `keep` checkpoints and that of step `best`; no leftovers of interrupted
    saves.

    Raises WrongState when the attempt was given up: what lies there is its successor's.
    """
    require_unfenced()
    for path in _by_step(root)[:-keep]:
        if _step(path) == best:
            continue
        shutil.rmtree(path)
        failpoint("old-checkpoint-deleted")
    for leftover in root.glob(".step-*.tmp"):
        shutil.rmtree(leftover)


def delete_after(root: Path, step: int) -> None:
    """Forget what came after `step`: a run that goes back to it goes another way from there.

    Raises WrongState when the attempt was given up.
    """
    require_unfenced()
    for path in _by_step(root):
        if _step(path) > step:
            shutil.rmtree(path)


def newest_checkpoint(root: Path, from_step: int | None = None) -> tuple[int, Path] | None:
    """(step, path) of the newest one that verifies, or of `from_step`; None where there is none.

    Raises NotFound if the one asked for is missing or broken, Corrupt if all there are are broken:
    to start again would throw the run's history away.
    """
    if from_step is not None:
        path = checkpoint_path(root, from_step)
        if not verifies(path):
            have = ", ".join(str(_step(p)) for p in _by_step(root)) or "none"
            raise NotFound(
                f"no good checkpoint of step {from_step}", field="--from", hint=f"there are: {have}"
            )
        return from_step, path
    for path in reversed(_by_step(root)):
        if verifies(path):
            return _step(path), path
        log.warning("%s is incomplete or damaged, trying the one before it", path)
    if _by_step(root):
        raise Corrupt(
            f"no checkpoint in {root} is whole",
            field="checkpoints",
            hint="restore one from a copy, or submit the job anew",
        )
    return None


def verifies(path: Path) -> bool:
    """Whether every file is there with the bytes that the manifest names."""
    try:
        files: dict[str, str] = json.loads((path / "manifest.json").read_text())["files"]
        return all(_sha256(path / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError):
        return False


def facts_of(path: Path) -> Mapping[str, str]:
    """What was true of the run when it was saved."""
    facts: dict[str, str] = json.loads((path / "state.json").read_text())
    return facts


def load_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the saved moments back; the model's own weights are loaded from path/model."""
    saved = load_file(path / "optimizer.safetensors")
    for name, parameter in model.named_parameters():
        moments = {
            key.split("/", 1)[1]: value
            for key, value in saved.items()
            if key.startswith(name + "/")
        }
        if moments:
            optimizer.state[parameter] = {
                # AdamW counts its steps on the CPU.
                kind: value if kind == "step" else share_of(value, parameter)
                for kind, value in moments.items()
            }


def load_anchor(path: Path, anchor: Anchor) -> None:
    """Put the saved anchor back, in each process its share.

    Raises InvalidInput if the run had none: one that began at this step would be another course.
    """
    if not (path / _ANCHOR).is_file():
        raise InvalidInput(
            f"{path.name} has no anchor: the run began without one",
            field="method.beta",
            hint="resume with 0, as it began, or submit the job anew",
        )
    with safe_open(path / _ANCHOR, "pt") as file:
        anchor.load_state(file.get_tensor, **json.loads(file.metadata()["counts"]))


def load_values(path: Path, values: CriticAdvantages) -> None:
    """Put the saved critic back. Raises InvalidInput if the run had none."""
    if not (path / _CRITIC).is_file():
        raise InvalidInput(
            f"{path.name} has no critic: the run began without one",
            field="method.advantages",
            hint="resume with what it began with, or submit the job anew",
        )
    values.load_state(load_file(path / _CRITIC).__getitem__)


def _optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{kind}": value
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def _by_step(root: Path) -> list[Path]:
    return sorted((p for p in root.glob("step-*") if _is_checkpoint(p)), key=_step)


def _is_checkpoint(path: Path) -> bool:
    return path.name[5:].isdecimal() and path.is_dir() and not path.is_symlink()


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _files(path: Path) -> list[Path]:
    return sorted(f for f in path.rglob("*") if f.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

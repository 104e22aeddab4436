"""Atomic, verified checkpoints, and the export of the trained model.

    checkpoints/step-000050/   model/                   Hugging Face directory; for LoRA, peft's
                               optimizer.safetensors    AdamW's moments
                               anchor.safetensors       only if the job has an anchor
                               critic.safetensors       only if the job has a critic
                               state.json               the step, the method's facts, and the
                                                        metrics of the step if not yet logged
                               manifest.json            SHA-256 of every other file

Tensors are stored in full, not as shards, so a run can resume with any number of processes.

A checkpoint is written to a temporary directory, synced to disk, and then renamed. Only after that
are older checkpoints deleted. A run resumes from the newest checkpoint that matches its manifest.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import time
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
from student_trainer.parallel.sharding import full_tensors, shard_like
from student_trainer.teachers.anchor import Anchor

log = logging.getLogger(__name__)

# A disk with less than this free counts as full.
_FULL_BYTES = 1 << 20
_ANCHOR = "anchor.safetensors"
_CRITIC = "critic.safetensors"


def checkpoint_path(root: Path, step: int) -> Path:
    """Return the directory of the checkpoint of `step` under `root`, which may not exist."""
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
    metrics: Mapping[str, float] | None = None,
    main: bool = True,
) -> None:
    """Collective. Write the checkpoint of `step` atomically; only the `main` process writes.

    Every process contributes its shards of the tensors. `facts`: strings that `facts_of` returns.
    `metrics`: those of the step, which `metrics_of` returns.
    Raises WrongState if a newer attempt has taken over the run.
    """
    adapted = has_adapters(model)
    weights = learned(model) if adapted else model.state_dict(keep_vars=True)
    weights = full_tensors(weights, keep=main)
    moments = full_tensors(_optimizer_tensors(model, optimizer), keep=main)
    anchored = full_tensors(anchor.state(), keep=main) if anchor is not None else {}

    def write(partial: Path) -> None:
        if adapted:
            save_adapters(partial / "model", model, weights)
        else:
            model.save_pretrained(partial / "model", state_dict=weights)
        tokenizer.save_pretrained(partial / "model")
        save_file(moments, partial / "optimizer.safetensors")
        if anchor is not None:
            counts = json.dumps({"updates": anchor.updates, "version": anchor.version})
            # One entry: safetensors writes several in random order, and files would differ.
            save_file(anchored, partial / _ANCHOR, metadata={"counts": counts})
        if values is not None:
            save_file(values.state(), partial / _CRITIC)
        state = {"step": step, **(facts or {})}
        if metrics is not None:
            state["metrics"] = dict(metrics)
        (partial / "state.json").write_text(json.dumps(state) + "\n")

    if main:
        write_atomically(checkpoint_path(root, step), write)


def export_model(
    path: Path,
    *,
    model: Any,
    tokenizer: Any,
    anchor: Anchor | None = None,
    dtype: torch.dtype = torch.float32,
    main: bool = True,
) -> None:
    """Collective. Write the model as a plain Hugging Face directory; only `main` writes.

    Weights are rounded to `dtype`, except those in `adapter/`.

    LoRA adapters are merged into the weights, and also stored alone in `adapter/`. The anchor is
    written the same way into `anchor/`. Raises WrongState if a newer attempt has taken over the
    run.
    """
    parameters = model.state_dict(keep_vars=True)
    weights = full_tensors(parameters, keep=main)
    anchored: dict[str, Tensor] = {}
    if anchor is not None:
        anchored = full_tensors(anchor.with_anchor_weights(parameters), keep=main)

    def write(partial: Path) -> None:
        _write_model(partial, model, weights, tokenizer, dtype)
        if anchor is not None:
            _write_model(partial / "anchor", model, anchored, tokenizer, dtype)

    if main:
        write_atomically(path, write)


def _write_model(
    path: Path, model: Any, weights: Mapping[str, Tensor], tokenizer: Any, dtype: torch.dtype
) -> None:
    adapted = has_adapters(model)
    everything = merged(model, weights) if adapted else weights
    model.save_pretrained(path, state_dict=_rounded(everything, dtype))
    if adapted:
        save_adapters(path / "adapter", model, {name: weights[name] for name in learned(model)})
    # save_pretrained takes the dtype from the model in memory.
    model.config.dtype = dtype
    model.config.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _rounded(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights in `dtype`. Names that share a tensor share it in the result too."""
    found = {id(one): one.to(dtype) if one.is_floating_point() else one for one in weights.values()}
    return {name: found[id(one)] for name, one in weights.items()}


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Write a directory atomically: `write` fills a temporary one, which is renamed to `path`.

    Adds a manifest, syncs every file to disk, and replaces a directory that exists at `path`.
    Raises WrongState if a newer attempt has taken over the run, before writing or before the
    rename.
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
    except BaseException as error:  # most likely the disk is full, so free the space
        number = _number_of(error, path.parent)
        shutil.rmtree(partial, ignore_errors=True)
        if number:
            raise OSError(number, os.strerror(number), str(path)) from error
        raise
    if path.exists():  # left by an earlier attempt that resumed from another step
        _delete(path)
        failpoint("checkpoint-replaced")
    partial.rename(path)
    failpoint("checkpoint-renamed")
    fsync_directory(path.parent)


def _number_of(error: BaseException, place: Path) -> int:
    """Return the errno of a failed write whose error is a library's own; 0 if there is none.

    safetensors writes the number into its message; torch writes none.
    """
    if isinstance(error, OSError) or not isinstance(error, Exception):
        return 0
    if found := re.search(r"\(os error (\d+)\)", str(error)):
        return int(found[1])
    with contextlib.suppress(OSError):
        if shutil.disk_usage(place).free < _FULL_BYTES:
            return errno.ENOSPC
    return 0


def _seal(partial: Path) -> None:
    """Add the manifest, and sync all files and directories to disk."""
    manifest = {"files": {str(f.relative_to(partial)): _sha256(f) for f in _files(partial)}}
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    failpoint("checkpoint-listed")
    for file in _files(partial):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    for directory in (partial, *(d for d in partial.rglob("*") if d.is_dir())):
        fsync_directory(directory)


def delete_old(root: Path, keep: int, *, best: int | None = None) -> None:
    """Delete all checkpoints but the newest `keep` and that of step `best`.

    Also deletes the temporary directories of interrupted saves. Raises WrongState if a newer
    attempt has taken over the run: the checkpoints are then that attempt's.
    """
    require_unfenced()
    for path in _by_step(root)[:-keep]:
        if _step(path) == best:
            continue
        _delete(path)
        failpoint("old-checkpoint-deleted")
    for leftover in root.glob(".step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def delete_after(root: Path, step: int) -> None:
    """Delete the checkpoints after `step`: a run that resumes from `step` replaces them.

    Raises WrongState if a newer attempt has taken over the run.
    """
    require_unfenced()
    for path in _by_step(root):
        if _step(path) > step:
            _delete(path)


def _delete(path: Path) -> None:
    """Delete a directory: rename it to a temporary name, then remove what can be removed.

    On a network file system a file that some process still has open leaves its directory behind.
    The next `delete_old` tries again.
    """
    aside = path.with_name(f".{path.name}.{time.time_ns()}.tmp")
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def newest_checkpoint(root: Path, from_step: int | None = None) -> tuple[int, Path] | None:
    """Return (step, path) of the newest intact checkpoint, or of `from_step`.

    Returns None if the run has no checkpoint and `from_step` is None.

    Raises NotFound if the checkpoint of `from_step` is missing or damaged. Raises Corrupt if there
    are checkpoints and all are damaged: starting again from step 0 would discard the run's history.
    """
    if from_step is not None:
        path = checkpoint_path(root, from_step)
        if not is_intact(path):
            have = ", ".join(str(_step(p)) for p in _by_step(root)) or "none"
            raise NotFound(
                f"there is no intact checkpoint of step {from_step}",
                field="--from",
                hint=f"steps with a checkpoint: {have}",
            )
        return from_step, path
    for path in reversed(_by_step(root)):
        if is_intact(path):
            return _step(path), path
        log.warning("%s is incomplete or damaged; trying the checkpoint before it", path)
    if _by_step(root):
        raise Corrupt(
            f"every checkpoint in {root} is incomplete or damaged",
            field="checkpoints",
            hint="restore a checkpoint from a backup, or submit a new job",
        )
    return None


def is_intact(path: Path) -> bool:
    """Return whether every file of the manifest exists and has the SHA-256 listed there."""
    try:
        files: dict[str, str] = json.loads((path / "manifest.json").read_text())["files"]
        return all(_sha256(path / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError):
        return False


def facts_of(path: Path) -> Mapping[str, str]:
    """Return the facts given to `save_checkpoint`."""
    state = json.loads((path / "state.json").read_text())
    return {name: value for name, value in state.items() if isinstance(value, str)}


def metrics_of(path: Path) -> Mapping[str, float] | None:
    """Return the metrics given to `save_checkpoint`; None if there are none."""
    metrics: Mapping[str, float] | None = json.loads((path / "state.json").read_text()).get(
        "metrics"
    )
    return metrics


def load_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load AdamW's state, in each process its shard; the weights are loaded from path/model."""
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
                kind: value if kind == "step" else shard_like(value, parameter)
                for kind, value in moments.items()
            }


def load_anchor(path: Path, anchor: Anchor) -> None:
    """Load the anchor's weights, in each process its shard.

    Raises InvalidInput if the checkpoint has no anchor: an anchor that starts at this step would
    change the training.
    """
    if not (path / _ANCHOR).is_file():
        raise InvalidInput(
            f"{path.name} has no anchor: the run started without one",
            field="method.beta",
            hint="resume with method.beta = 0, or submit a new job",
        )
    with safe_open(path / _ANCHOR, "pt") as file:
        anchor.load_state(file.get_tensor, **json.loads(file.metadata()["counts"]))


def load_values(path: Path, values: CriticAdvantages) -> None:
    """Load the critic and its optimizer. Raises InvalidInput if the checkpoint has no critic."""
    if not (path / _CRITIC).is_file():
        raise InvalidInput(
            f"{path.name} has no critic: the run started without one",
            field="method.advantages",
            hint="resume with the value the run started with, or submit a new job",
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

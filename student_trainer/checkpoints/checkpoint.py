"""The contents of a checkpoint, the choice of the checkpoints to keep, and loading.

    checkpoints/step-000050/   model/                   Hugging Face directory; for LoRA, the format
                                                        of peft
                               optimizer.safetensors    the state of AdamW
                               anchor.safetensors       only if the job has an anchor
                               critic.safetensors       only if the job has a critic
                               state.json               the step, the facts of the method, and, if
                                                        metrics.jsonl lacks them, the metrics of the
                                                        step
                               manifest.json            SHA-256 of every part of every other file

The files contain full tensors. Each process writes and reads its rows of every tensor
(`tensor_file.py`). A run can therefore resume with any number of processes, and other programs can
load `model/`. For a mixture of experts, `model/` stores all experts of a layer in one tensor, as
transformers does in memory. The export stores them in the published format instead.

A checkpoint is written while training continues (`saver.py`), and appears atomically
(`atomic_directory.py`). A run resumes from the newest checkpoint that matches its manifest.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch import Tensor, nn

from clients.runs.fence import require_unfenced
from protos.errors import Corrupt, InvalidInput, NotFound
from protos.rpc.failpoints import failpoint
from student_trainer.checkpoints.atomic_directory import delete, is_intact
from student_trainer.checkpoints.model_directory import remove_aliases, split_weights
from student_trainer.checkpoints.optimizer_state import load_optimizer_state, optimizer_tensors
from student_trainer.checkpoints.tensor_file import TensorFile, build_layout, read_shard
from student_trainer.critic import CriticAdvantages
from student_trainer.model.lora import FILE as ADAPTERS
from student_trainer.model.lora import adapter_key, has_adapters, trainable_weights
from student_trainer.parallel.collectives import max_over_ranks
from student_trainer.teachers.anchor import Anchor

log = logging.getLogger(__name__)

_OPTIMIZER = "optimizer.safetensors"
_ANCHOR = "anchor.safetensors"
_CRITIC = "critic.safetensors"


@dataclass(frozen=True)
class Contents:
    """The tensors of a checkpoint and the layouts of their files.

    - tensors: the tensors by file and name. They are the tensors of the run itself, not copies.
    - layouts: the layout of each of these files, by file.
    - index: the text of the index of the weights, by the name of the index file; empty if one file
      contains all weights.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    layouts: Mapping[str, TensorFile]
    index: Mapping[str, bytes]


def collect_contents(
    model: Any,
    optimizer: torch.optim.Optimizer,
    anchor: Anchor | None = None,
    critic: CriticAdvantages | None = None,
) -> Contents:
    """Return the tensors that a checkpoint of the run stores.

    The files and names are the same on every rank.
    """
    tensors: dict[str, Mapping[str, Tensor]] = {}
    metadata: dict[str, dict[str, str]] = {}
    index: dict[str, bytes] = {}
    if has_adapters(model):
        adapters = trainable_weights(model)
        tensors[f"model/{ADAPTERS}"] = {
            adapter_key(name): adapter for name, adapter in adapters.items()
        }
    else:
        weights = remove_aliases(model, model.state_dict(keep_vars=True))
        split, text = split_weights(weights, model.num_parameters())
        tensors |= {f"model/{file}": adapter for file, adapter in split.items()}
        metadata = {f"model/{file}": {"format": "pt"} for file in split}
        index = {f"model/{file}": adapter for file, adapter in text.items()}
    tensors[_OPTIMIZER] = optimizer_tensors(model, optimizer)
    if anchor is not None:
        tensors[_ANCHOR] = anchor.state()
        counts = json.dumps({"updates": anchor.updates, "version": anchor.version})
        metadata[_ANCHOR] = {"counts": counts}
    if critic is not None:
        tensors[_CRITIC] = critic.state()
    layouts = {file: build_layout(adapter, metadata.get(file)) for file, adapter in tensors.items()}
    return Contents(tensors, layouts, index)


def format_state(
    step: int, facts: Mapping[str, str] | None, metrics: Mapping[str, float] | None
) -> bytes:
    """Return the text of state.json.

    `facts`: the facts of the method, see `Saver`. `metrics`: the metrics of `step` if metrics.jsonl
    does not contain them yet, otherwise None.
    """
    state = {"step": step, **(facts or {})}
    if metrics is not None:
        state["metrics"] = dict(metrics)
    return (json.dumps(state) + "\n").encode()


def checkpoint_path(root: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step` under `root`. The checkpoint need not exist."""
    return root / f"step-{step:06d}"


def delete_old(root: Path, keep: int, *, best: int | None = None) -> None:
    """Delete all checkpoints except the newest `keep` and the checkpoint of step `best`.

    Also deletes the temporary directories of interrupted saves. Raises WrongState if a newer
    attempt has taken over the run: the checkpoints then belong to that attempt.
    """
    require_unfenced()
    for path in _list_checkpoints(root)[:-keep]:
        if _step_of(path) == best:
            continue
        delete(path)
        failpoint("old-checkpoint-deleted")
    for leftover in root.glob(".step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def delete_after(root: Path, step: int) -> None:
    """Delete the checkpoints after `step`: a run that resumes from `step` replaces them.

    Raises WrongState if a newer attempt has taken over the run.
    """
    require_unfenced()
    for path in _list_checkpoints(root):
        if _step_of(path) > step:
            delete(path)


def newest_checkpoint(
    root: Path, from_step: int | None = None, *, intact: Callable[[Path], bool] = is_intact
) -> tuple[int, Path] | None:
    """Return (step, path) of the newest intact checkpoint or, with `from_step`, of the checkpoint
    of that step.

    `intact`: a function that returns whether a directory matches its manifest. If the function is
    collective, `newest_checkpoint` is collective too.

    Returns None if the run has no checkpoint and `from_step` is None.

    Raises NotFound if the checkpoint of `from_step` is missing or damaged. Raises Corrupt if there
    are checkpoints and all are damaged: starting again from step 0 would discard the run's history.
    """
    if from_step is not None:
        path = checkpoint_path(root, from_step)
        if not intact(path):
            available_steps = ", ".join(str(_step_of(p)) for p in _list_checkpoints(root)) or "none"
            raise NotFound(
                f"there is no intact checkpoint of step {from_step}",
                field="--from",
                hint=f"steps with a checkpoint: {available_steps}",
            )
        return from_step, path
    for path in reversed(_list_checkpoints(root)):
        if intact(path):
            return _step_of(path), path
        log.warning("%s is incomplete or damaged; trying the checkpoint before it", path)
    if _list_checkpoints(root):
        raise Corrupt(
            f"every checkpoint in {root} is incomplete or damaged",
            field="checkpoints",
            hint="restore a checkpoint from a backup, or submit a new job",
        )
    return None


def read_facts(path: Path) -> Mapping[str, str]:
    """Return the facts of the method that the checkpoint at `path` stores, by name; see `Saver`."""
    state = json.loads((path / "state.json").read_text())
    return {name: value for name, value in state.items() if isinstance(value, str)}


def read_metrics(path: Path) -> Mapping[str, float] | None:
    """Return the metrics of the step that the checkpoint at `path` stores; None if it stores none.

    A checkpoint stores metrics only if metrics.jsonl did not contain them yet; see `Saver.save`.
    """
    metrics: Mapping[str, float] | None = json.loads((path / "state.json").read_text()).get(
        "metrics"
    )
    return metrics


def intact_for_all(accelerator: Accelerator, path: Path) -> bool:
    """Collective. Return whether a checkpoint matches its manifest.

    Each process checks a share of the files. All processes get the same result.
    """
    share = accelerator.process_index, accelerator.num_processes
    return not max_over_ranks(accelerator, int(not is_intact(path, *share)))


def load_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the state of AdamW from a checkpoint. Each process reads only its shard."""
    with safe_open(path / _OPTIMIZER, "pt") as file:
        load_optimizer_state(file, model, optimizer)


def load_anchor(path: Path, anchor: Anchor) -> None:
    """Load the weights and the update counts of the anchor. Each process reads only its shard.

    Raises InvalidInput if the checkpoint has no anchor: a new anchor, which would start at this
    step, would change the training.
    """
    _require_part(path / _ANCHOR, "anchor", "method.beta", "resume with method.beta = 0")
    with safe_open(path / _ANCHOR, "pt") as file:
        counts = json.loads(file.metadata()["counts"])
        anchor.load_state(lambda name, like: read_shard(file, name, like), **counts)


def load_critic(path: Path, critic: CriticAdvantages) -> None:
    """Load the critic and its optimizer. Raises InvalidInput if the checkpoint has no critic."""
    _require_part(
        path / _CRITIC, "critic", "method.advantages", "resume with the value the run started with"
    )
    with safe_open(path / _CRITIC, "pt") as file:
        critic.load_state(file.get_tensor)


def _require_part(file: Path, part: str, field: str, remedy: str) -> None:
    """Raise InvalidInput if the checkpoint lacks `file`.

    `part`: the name of the contents of the file, such as "critic". `field`, `remedy`: the key and
    the remedy for the error message.
    """
    if not file.is_file():
        raise InvalidInput(
            f"{file.parent.name} has no {part}: the run started without one",
            field=field,
            hint=f"{remedy}, or submit a new job",
        )


def _list_checkpoints(root: Path) -> list[Path]:
    return sorted((p for p in root.glob("step-*") if _is_checkpoint(p)), key=_step_of)


def _is_checkpoint(path: Path) -> bool:
    return path.name[5:].isdecimal() and path.is_dir() and not path.is_symlink()


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))

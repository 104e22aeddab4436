"""Checks that the checkpoints and the export of a training job fit on the disk."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

from clients.config.kinds import AnyTraining
from clients.config.rl import RLJob
from clients.config.tables.common import FEWEST_CHECKPOINTS
from clients.data.regular_file import open_regular, read_document
from clients.runs.directory import RunDirectory
from protos.errors import WrongState

_FLOAT32 = 4
# The weights and the two moments of AdamW, in sizes of the weights.
_CHECKPOINT_COPIES = {"adamw": 3.0, "adamw_8bit": 1.5}
# Most bytes of a safetensors header. A tensor takes about 100 bytes in it, so no real model has
# more.
_MOST_HEADER_BYTES = 32 << 20


def check_space(config: AnyTraining, run: Path) -> None:
    """Raise WrongState if the disk has too little space for the job's checkpoints and export.

    `run` is the run directory, or the directory in which it will be made. Files of earlier attempts
    count as available space.

    The estimate is a lower bound. It takes all weights as float32, the dtype of trained weights.
    It leaves out other jobs, logs, rows, adapters, a best checkpoint that is not among the newest,
    and students from the hub, whose size is unknown here.
    """
    checkpoint, export = _sizes(config)
    saves = math.ceil(config.max_steps / config.checkpoint.every)
    # The oldest checkpoint is deleted only after the new one is complete.
    most = min(saves, config.checkpoint.keep + 1)
    needed = max(most * checkpoint, min(saves, config.checkpoint.keep) * checkpoint + export)
    there = next(path for path in (run, *run.parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    if needed > free and needed - _kept(RunDirectory(run)) > free:
        raise WrongState(
            f"the job needs {_gb(needed)} of disk space, but only {_gb(free)} are free: {most}"
            f" checkpoints of {_gb(checkpoint)} at a time, and an export of {_gb(export)}",
            field="checkpoint.keep",
            hint="lower it, or free disk space"
            if config.checkpoint.keep > FEWEST_CHECKPOINTS
            else "free disk space: checkpoint.keep is at its minimum",
        )


def parameters_of(model: Path) -> int:
    """Return the number of parameters of a Hugging Face directory; 0 if it cannot be read.

    Reads the safetensors headers only.
    """
    try:
        return sum(_parameters_in(model / name) for name in _weight_files(model))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return 0


def _sizes(config: AnyTraining) -> tuple[int, int]:
    """Return the bytes of a checkpoint and of the export."""
    weights = _FLOAT32 * parameters_of(Path(config.student.model))
    anchored = weights if isinstance(config, RLJob) and config.method.beta else 0
    export = weights + anchored if config.export.dtype == "float32" else (weights + anchored) // 2
    if config.student.lora is not None:
        # A checkpoint contains only the adapters; the export contains the merged weights.
        return 0, export
    copies = _CHECKPOINT_COPIES[config.train.optimizer]
    return round(copies * weights) + anchored, export


def _weight_files(model: Path) -> set[str]:
    """Return the files that transformers would read; others may hold the same weights again."""
    if (model / "model.safetensors").is_file():
        return {"model.safetensors"}
    index = read_document(model / "model.safetensors.index.json")
    return {Path(name).name for name in index["weight_map"].values()}


def _parameters_in(file: Path) -> int:
    with open_regular(file) as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > _MOST_HEADER_BYTES:
            raise ValueError(f"{file} has no valid safetensors header")
        header = json.loads(opened.read(size))
    return sum(math.prod(facts["shape"]) for name, facts in header.items() if name[:2] != "__")


def _kept(run: RunDirectory) -> int:
    """Return the bytes of the checkpoints and export that earlier attempts have written."""
    made = (run.checkpoints, run.export)
    files = (file for directory in made for file in directory.rglob("*"))
    return sum(file.lstat().st_size for file in files if not file.is_dir())


def _gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB"

"""Whether a training's checkpoints and its export fit on the disk."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

from clients.config.kinds import AnyTraining
from clients.config.rl import RLJob
from clients.data.regular_file import open_regular, read_document
from clients.runs.directory import RunDirectory
from protos.errors import WrongState

_FLOAT32 = 4
# The weights, and the two moments that AdamW keeps of each.
_CHECKPOINT_COPIES = 3
# Of a tensor in a safetensors header: about 100 bytes. That many are no model's.
_MOST_HEADER_BYTES = 32 << 20


def check_space(config: AnyTraining, run: Path) -> None:
    """Refuse a job whose checkpoints cannot be kept. `run`: its directory, or the one that it will
    be made in. Raises WrongState.

    A lower bound: what learns is in float32, whatever it was loaded from; other jobs, logs, rows,
    adapters and the best checkpoint, where it is none of the newest, are not counted, nor are
    students of the hub, whose size is not known here.
    """
    checkpoint, export = _sizes(config)
    saves = math.ceil(config.max_steps / config.checkpoint.every)
    # The new one is whole before the oldest is deleted.
    most = min(saves, config.checkpoint.keep + 1)
    needed = max(most * checkpoint, min(saves, config.checkpoint.keep) * checkpoint + export)
    there = next(path for path in (run, *run.parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    if needed > free and needed - _kept(RunDirectory(run)) > free:
        raise WrongState(
            f"{_gb(free)} of the disk are free, and the job needs {_gb(needed)}: {most} checkpoints"
            f" of {_gb(checkpoint)} at a time, and an export of {_gb(export)}",
            field="checkpoint.keep",
            hint="lower it, or free some of the disk",
        )


def parameters_of(model: Path) -> int:
    """Numbers in the weights of a Hugging Face directory; 0 where they cannot be told."""
    try:
        return sum(_parameters_in(model / name) for name in _weight_files(model))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return 0


def _sizes(config: AnyTraining) -> tuple[int, int]:
    """Bytes of a checkpoint, and of the export."""
    weights = _FLOAT32 * parameters_of(Path(config.student.model))
    anchored = weights if isinstance(config, RLJob) and config.method.beta else 0
    if config.student.lora is not None:
        # A checkpoint has the adapters only, the export is merged with them.
        return 0, weights + anchored
    return _CHECKPOINT_COPIES * weights + anchored, weights + anchored


def _weight_files(model: Path) -> set[str]:
    """As transformers reads them: a directory may hold the same weights in other files too."""
    if (model / "model.safetensors").is_file():
        return {"model.safetensors"}
    index = read_document(model / "model.safetensors.index.json")
    return {Path(name).name for name in index["weight_map"].values()}


def _parameters_in(file: Path) -> int:
    with open_regular(file) as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > _MOST_HEADER_BYTES:
            raise ValueError(f"{file} has no header")
        header = json.loads(opened.read(size))
    return sum(math.prod(facts["shape"]) for name, facts in header.items() if name[:2] != "__")


def _kept(run: RunDirectory) -> int:
    """Bytes that earlier attempts have written already."""
    made = (run.checkpoints, run.export)
    files = (file for directory in made for file in directory.rglob("*"))
    return sum(file.lstat().st_size for file in files if not file.is_dir())


def _gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB"

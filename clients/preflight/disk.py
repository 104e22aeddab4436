"""Checks that the checkpoints, the export and the weight versions of a job fit on the disk."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

from clients.config.tables.common import MIN_CHECKPOINTS
from clients.config.tables.job import TrainingJob
from clients.data.outside import open_regular, read_document
from clients.runs.directory import RunDirectory
from clients.runs.file_system import has_room
from protos.errors import WrongState

_FLOAT32, _BFLOAT16 = 4, 2
# The weights and the two moments of AdamW, in sizes of the weights.
_CHECKPOINT_COPIES = {"adamw": 3.0, "adamw_8bit": 1.5}
# Maximum bytes of a safetensors header. A tensor takes about 100 bytes in it, so no real model has
# more.
_MAX_HEADER_BYTES = 32 << 20


class TooLittleSpace(WrongState):
    """The disk has too little space for the files of a job."""


def check_space(config: TrainingJob, run: Path, *, here: bool = True) -> None:
    """Raise TooLittleSpace if the disk has too little space for the files of the job.

    The files are checkpoints, the export, and the versions of the weights for rollout engines,
    unless these are in memory. The space of files of earlier attempts is available, because the new
    attempt replaces these files.

    - run: the run directory or its future parent directory.
    - here: whether the job's program runs on this machine.

    The estimate is a lower bound. It assumes float32, the dtype of trained weights. It excludes
    other jobs, logs, rows, adapters, a best checkpoint that is not among the newest, and students
    from the hub, whose size is unknown here.
    """
    checkpoint_bytes, export_bytes = _file_sizes(config)
    saves = math.ceil(config.max_steps / config.checkpoint.every)
    if config.max_steps == 0:  # unknown before the data are read
        saves = config.checkpoint.keep + 1
    # The oldest checkpoint is deleted only after the new one is complete.
    max_checkpoints = min(saves, config.checkpoint.keep + 1)
    file_bytes = max(
        max_checkpoints * checkpoint_bytes,
        min(saves, config.checkpoint.keep) * checkpoint_bytes + export_bytes,
    )
    version_count, version_bytes = _count_versions(config, here=here)
    needed_bytes = file_bytes + version_count * version_bytes
    existing_directory = next(path for path in (run, *run.parents) if path.is_dir())
    free_bytes = shutil.disk_usage(existing_directory).free
    if (
        needed_bytes <= free_bytes
        or needed_bytes - _replaceable_bytes(RunDirectory(run)) <= free_bytes
    ):
        return
    parts = (
        f"{max_checkpoints} checkpoints of {_format_gb(checkpoint_bytes)} at a time, and an export"
        f" of {_format_gb(export_bytes)}"
    )
    if version_count:
        parts += (
            f", and {version_count} versions of the weights of {_format_gb(version_bytes)} for"
            " rollout engines"
        )
    raise TooLittleSpace(
        f"the job needs {_format_gb(needed_bytes)} of disk space, but only"
        f" {_format_gb(free_bytes)} are free: {parts}",
        **_field_and_hint(config, by_versions=version_count > 0 and file_bytes <= free_bytes),
    )


def _field_and_hint(config: TrainingJob, *, by_versions: bool) -> dict[str, str]:
    """Return the field and the hint of the error.

    `by_versions`: whether the files would fit without the versions of the weights.
    """
    if by_versions:
        memory = (
            "free disk space, or enlarge /dev/shm, which holds the weights if it is large enough"
        )
        return {"field": "rollouts.lag", "hint": f"lower the value, {memory}"}
    if config.checkpoint.keep > MIN_CHECKPOINTS:
        return {"field": "checkpoint.keep", "hint": "lower the value, or free disk space"}
    hint = "free disk space: checkpoint.keep is at its minimum"
    return {"field": "checkpoint.keep", "hint": hint}


def _count_versions(config: TrainingJob, *, here: bool) -> tuple[int, int]:
    """Return (number of versions of the weights in the run directory, bytes of one version).

    The result is (0, 0) if the versions are in memory. It is also (0, 0) if they are unknown: for a
    job on a cluster, or for a student with adapters.
    """
    rollouts = config.rollout_engine
    if not here or rollouts is None or config.student.lora is not None:
        return 0, 0
    is_bfloat16 = rollouts.engine == "vllm" and config.student.dtype != "float32"
    version_bytes = (_BFLOAT16 if is_bfloat16 else _FLOAT32) * parameters_of(
        Path(config.student.model)
    )
    local = rollouts.address is None
    if local and has_room((rollouts.versions + 1) * version_bytes):
        return 0, 0
    return rollouts.versions, version_bytes


def parameters_of(model: Path) -> int:
    """Return the number of parameters of a Hugging Face directory; 0 if it cannot be read.

    Reads the safetensors headers only.
    """
    try:
        return sum(_parameters_in(model / name) for name in _weight_files(model))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return 0


def _file_sizes(config: TrainingJob) -> tuple[int, int]:
    """Return (bytes of a checkpoint, bytes of the export)."""
    weights = _FLOAT32 * parameters_of(Path(config.student.model))
    anchored = weights if config.has_anchor else 0
    export = weights + anchored if config.export.dtype == "float32" else (weights + anchored) // 2
    if config.student.lora is not None:
        # A checkpoint contains only the adapters; the export contains the merged weights.
        return 0, export
    copies = _CHECKPOINT_COPIES[config.train.optimizer]
    return round(copies * weights) + anchored, export


def _weight_files(model: Path) -> set[str]:
    """Return the weight files that transformers would read. Other files may contain the same
    weights.
    """
    if (model / "model.safetensors").is_file():
        return {"model.safetensors"}
    index = read_document(model / "model.safetensors.index.json")
    return {Path(name).name for name in index["weight_map"].values()}


def _parameters_in(file: Path) -> int:
    with open_regular(file) as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > _MAX_HEADER_BYTES:
            raise ValueError(f"{file} has no valid safetensors header")
        header = json.loads(opened.read(size))
    return sum(math.prod(facts["shape"]) for name, facts in header.items() if name[:2] != "__")


def _replaceable_bytes(run: RunDirectory) -> int:
    """Return the bytes of files of earlier attempts, which this attempt replaces."""
    directories = (run.checkpoints, run.export, run.weights)
    files = (file for directory in directories for file in directory.rglob("*"))
    return sum(file.lstat().st_size for file in files if not file.is_dir())


def _format_gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB"

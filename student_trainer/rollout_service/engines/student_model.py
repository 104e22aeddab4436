"""The student model of a rollout service: its options, and a check of snapshots against it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clients.config.tables.common import LoraConfig, StudentConfig
from protos.errors import Corrupt, InvalidInput
from student_trainer.checkpoints.export import published_shapes
from student_trainer.model.lora import adapter_key, has_adapters, trainable_weights
from student_trainer.rollout_client.order import WeightsVersion
from student_trainer.rollout_client.snapshot import Snapshot, open_snapshot

_OTHER_MODEL = "start the rollout service with the --model and --lora-rank of the student"


def student_config(model: str, dtype: str, lora_rank: int) -> StudentConfig:
    """Return the student configuration for the options `--model`, `--dtype` and `--lora-rank`.

    `lora_rank`: rank of the student's adapters; snapshots then contain only the adapters. 0 means
    that the student has no adapters. Raises InvalidInput if an option cannot be used.
    """
    if dtype not in ("auto", "float32", "bfloat16"):
        raise InvalidInput(
            f"unknown dtype {dtype!r}", field="--dtype", hint="use auto, float32 or bfloat16"
        )
    lora = LoraConfig(rank=lora_rank) if lora_rank else None
    return StudentConfig(model=model, dtype=dtype, lora=lora)


def snapshot_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a snapshot by name: all weights, or only the adapters.

    The model may be on the device meta, without data.
    """
    if has_adapters(model):
        return {
            adapter_key(name): tuple(weight.shape)
            for name, weight in trainable_weights(model).items()
        }
    return published_shapes(model)


def open_version(version: WeightsVersion, shapes: Mapping[str, tuple[int, ...]]) -> Snapshot:
    """Open the snapshot of a version, and check that it fits the model.

    `shapes`: the shapes of the model's weights, from `snapshot_shapes`. Raises Corrupt if the
    snapshot is incomplete, damaged, of another version or of another model. The message names the
    weight that differs.
    """
    snapshot = open_snapshot(version.directory)
    if snapshot.number != version.number:
        raise Corrupt(f"{version.directory} has version {snapshot.number}, not {version.number}")
    _check_shapes(version.directory, snapshot.shapes(), shapes)
    return snapshot


def _check_shapes(
    directory: Path,
    received_shapes: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise Corrupt if the names and shapes of the received weights differ from `shapes`."""
    for name, shape in sorted(received_shapes.items()):
        if name not in shapes:
            raise Corrupt(
                f"{directory} has {name}, which the model of the rollout service does not have",
                hint=_OTHER_MODEL,
            )
        if shape != shapes[name]:
            raise Corrupt(
                f"{directory} has {name} in shape {list(shape)}, but the model of the"
                f" rollout service has {list(shapes[name])}",
                hint=_OTHER_MODEL,
            )
    missing = shapes.keys() - received_shapes.keys()
    if missing:
        raise Corrupt(
            f"{directory} has no {min(missing)}, a weight of the rollout service's model",
            hint=_OTHER_MODEL,
        )

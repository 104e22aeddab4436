"""The student of a rollout service: its options, and whether a snapshot is of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clients.config.tables.common import LoraConfig, StudentConfig
from protos.errors import Corrupt, InvalidInput
from student_trainer.checkpoints.export import published_shapes
from student_trainer.model.lora import adapter_key, has_adapters, trainable_weights
from student_trainer.rollout_client.order import WeightsVersion
from student_trainer.rollout_client.snapshot import Snapshot, open_snapshot

_OTHER_MODEL = "start the rollout service with the --model and --lora-rank of the student"


def student_config(model: str, dtype: str, lora_rank: int) -> StudentConfig:
    """Return the student of the options `--model`, `--dtype` and `--lora-rank`.

    `lora_rank`: of the student's adapters, which snapshots have then in place of all weights; 0:
    the student has none. Raises InvalidInput.
    """
    if dtype not in ("auto", "float32", "bfloat16"):
        raise InvalidInput(
            f"unknown dtype {dtype!r}", field="--dtype", hint="use auto, float32 or bfloat16"
        )
    lora = LoraConfig(rank=lora_rank) if lora_rank else None
    return StudentConfig(model=model, dtype=dtype, lora=lora)


def snapshot_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a snapshot's weights by name: all weights, or the adapters alone.

    The model may be without data (device meta).
    """
    if has_adapters(model):
        return {adapter_key(name): tuple(of.shape) for name, of in trainable_weights(model).items()}
    return published_shapes(model)


def open_version(version: WeightsVersion, shapes: Mapping[str, tuple[int, ...]]) -> Snapshot:
    """Return the snapshot of a version whose weights have the names and shapes of the model.

    `shapes`: what `snapshot_shapes` returns for the model. Raises Corrupt if the snapshot is
    incomplete, damaged, of another version or of another model; the message names the weight that
    differs.
    """
    snapshot = open_snapshot(version.directory)
    if snapshot.number != version.number:
        raise Corrupt(f"{version.directory} has version {snapshot.number}, not {version.number}")
    check_shapes(str(version.directory), snapshot.shapes(), shapes)
    return snapshot


def check_shapes(
    where: str, found: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise Corrupt unless the weights `found` at `where` are those of the model; see above."""
    for name, shape in sorted(found.items()):
        if name not in shapes:
            raise Corrupt(
                f"{where} has {name}, which the model of the rollout service has not",
                hint=_OTHER_MODEL,
            )
        if shape != shapes[name]:
            raise Corrupt(
                f"{where} has {name} in shape {list(shape)}, but the model of the"
                f" rollout service has {list(shapes[name])}",
                hint=_OTHER_MODEL,
            )
    missing = shapes.keys() - found.keys()
    if missing:
        raise Corrupt(
            f"{where} has no {min(missing)}, a weight of the rollout service's model",
            hint=_OTHER_MODEL,
        )

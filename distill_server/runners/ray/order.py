"""The order for the driver of an attempt: a file that the server writes and the driver removes.

The order is not part of Ray's job description, because its environment holds secrets and every
client of the cluster can list job descriptions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class TrainerOrder:
    """The processes of one attempt.

    Each of the `processes` runs Python with `arguments` and gets `cpus` CPUs and `gpus` GPUs of one
    node. Each of the `engines`, rollout services beside them, runs Python with `engine_arguments`
    and gets `cpus` CPUs and `engine_gpus` GPUs of one node. `run` is the path of the run directory.
    `folder` is the working directory, against which a job's relative paths resolve; a node without
    it uses the rank's directory.
    """

    run: str
    attempt: int
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    processes: int
    cpus: int
    gpus: int
    engines: int = 0
    engine_gpus: int = 0
    engine_arguments: Sequence[str] = ()


def write_order(path: Path, order: TrainerOrder) -> None:
    """Write the order durably, with mode 600."""
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    with open(descriptor, "w") as file:
        json.dump(asdict(order), file)
        file.flush()
        os.fsync(file.fileno())


def take_order(path: Path) -> TrainerOrder:
    """Read an order and remove its file."""
    order = TrainerOrder(**json.loads(path.read_text()))
    path.unlink()
    return order

"""What the server asks of the driver of an attempt, in a file that the driver reads and removes.

Not in Ray's own job description, which whoever reaches the cluster may list: the environment holds
secrets.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Order:
    """`processes` of `arguments` to Python, each with so many CPUs and GPUs of one node.

    `folder`: where a job's relative paths begin, if a node has it.
    """

    run: str
    attempt: int
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    processes: int
    cpus: int
    gpus: int


def write_order(path: Path, order: Order) -> None:
    """For this user's eyes only."""
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    with open(descriptor, "w") as file:
        json.dump(asdict(order), file)
        file.flush()
        os.fsync(file.fileno())


def take_order(path: Path) -> Order:
    """Read the file and remove it."""
    order = Order(**json.loads(path.read_text()))
    path.unlink()
    return order

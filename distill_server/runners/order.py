"""The order for the driver of an attempt on a cluster: a file that the server writes.

The order is not a part of the job description of the cluster, because every client of the cluster
can read that description. The environment in the order holds secrets.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from clients.runs.directory import RunDirectory
from clients.runs.fence import VARIABLE as FENCE
from clients.runs.fence import raise_fence
from distill_server.runners.interface import CommandFactory
from distill_server.runners.machine import Share
from distill_server.runners.trainer_environment import (
    attempt_tokens,
    threads_of,
    trainer_environment,
)


@dataclass(frozen=True)
class TrainerOrder:
    """The processes of one attempt.

    - processes: number of trainer processes. Each runs Python with `arguments`, and gets `cpus`
      CPUs and `gpus` GPUs of one node.
    - engines: number of rollout services. Each runs Python with `engine_arguments`, and gets `cpus`
      CPUs and `engine_gpus` GPUs of one node.
    - run: path of the run directory.
    - folder: working directory for the job's relative paths. A node without this directory uses the
      rank's directory.
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


def attempt_name(run: RunDirectory, attempt: int) -> str:
    """Return the name of an attempt on a cluster.

    The name has a hash of the run directory: two servers on a cluster may use the same job id.
    """
    return f"{run.path.name}-{sha256(bytes(run.path)).hexdigest()[:8]}-{attempt}"


def place_order(
    run: RunDirectory,
    command: CommandFactory,
    *,
    attempt: int,
    processes: int,
    from_step: int | None,
    share: Share,
    **resources: Any,
) -> Path:
    """Forbid earlier attempts to write to the run directory, and write the order of this attempt.

    Returns the file of the order. `command` builds the command line of one process: the driver runs
    it once per rank. `resources` are the fields of TrainerOrder for GPUs and engines. Raises
    OSError if the order cannot be written.
    """
    fence = raise_fence(run.path, attempt)
    directory = run.logs(attempt)
    directory.mkdir(parents=True, exist_ok=True)
    _, *arguments = command(run.path, attempt=attempt, processes=1, from_step=from_step)
    environment = trainer_environment(os.environ, share, processes)
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # names GPUs of this machine, not of a node
    order = TrainerOrder(
        run=str(run.path),
        attempt=attempt,
        arguments=arguments,
        environment={**environment, **attempt_tokens(run.path.name, attempt), FENCE: fence},
        folder=os.getcwd(),
        processes=processes,
        cpus=threads_of(share, processes),
        **resources,
    )
    path = directory / "order.json"
    write_order(path, order)
    return path


def write_order(path: Path, order: TrainerOrder) -> None:
    """Write the order to `path` durably; only this user may read the file (mode 600)."""
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    with open(descriptor, "w") as file:
        json.dump(asdict(order), file)
        file.flush()
        os.fsync(file.fileno())


def read_order(path: Path) -> TrainerOrder:
    """Return the order in the file `path`."""
    return TrainerOrder(**json.loads(path.read_text()))


def take_order(path: Path) -> TrainerOrder:
    """Return the order in the file `path`, and delete the file."""
    order = read_order(path)
    path.unlink()
    return order

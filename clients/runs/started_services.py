"""Files in the run directory with the addresses of services that were started for the job.

Teacher: a server or `distill run` starts the teacher, and writes its address before each attempt.
The job keeps `teacher.model`, and the processes of the attempt connect to the address in the file.

Rollout services on a cluster: the runner replaces the file whenever a service starts, moves or
exits. The processes of the trainer read the file before they connect. The number of services never
changes, so each process always sends its orders to the same services.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from clients.config.kinds import AnyTraining
from clients.config.tables.teacher import STARTED_KEYS
from clients.data.outside import read_document
from clients.runs.directory import replace_file
from protos.errors import Unavailable

_TEACHER_FILE = "teacher.json"


def write_address(run: Path, address: str) -> None:
    """Write HOST:PORT of the teacher that was started for the job to the run directory."""
    replace_file(run / _TEACHER_FILE, json.dumps({"address": address}) + "\n")


def connected(config: AnyTraining, run: Path) -> AnyTraining:
    """Return the job with the address of its started teacher.

    The address replaces the keys about the teacher's model. Only a job that names a model has a
    started teacher; any other job is returned unchanged. Raises Unavailable if the teacher was not
    started.
    """
    teacher = config.started_teacher
    if teacher is None:
        return config
    try:
        address = str(read_document(run / _TEACHER_FILE)["address"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unavailable(
            "the teacher of the job has not been started",
            field="teacher.model",
            hint="run the job with a server or with distill run",
        ) from error
    values = teacher.model_dump(exclude_unset=True, exclude={*STARTED_KEYS})
    connected_teacher = type(teacher).model_validate({**values, "address": address})
    return config.model_copy(update={"teacher": connected_teacher})


# Names the file in the environment of the trainer's processes.
PLACED_VARIABLE = "DISTILL_ROLLOUT_SERVICES"


@dataclass(frozen=True)
class PlacedService:
    """A rollout service on a cluster.

    - `address`: HOST:PORT; "" while the service does not run
    - `problem`: why the service does not run
    """

    address: str = ""
    problem: str = ""


def write_placed(file: Path, services: Sequence[PlacedService], *, one_machine: bool) -> None:
    """Replace the file that lists the rollout services.

    `one_machine`: True if all services and all trainer processes are on one machine.
    """
    listed = [asdict(service) for service in services]
    replace_file(file, json.dumps({"one_machine": one_machine, "services": listed}) + "\n")


def read_placed(file: Path) -> tuple[list[PlacedService], bool]:
    """Read the file that `write_placed` wrote. Return (rollout services, one_machine).

    `one_machine` is True if all services and all trainer processes are on one machine. Raises
    Unavailable if the file cannot be read.
    """
    try:
        document = read_document(file)
        services = [
            PlacedService(str(service["address"]), str(service["problem"]))
            for service in document["services"]
        ]
        return services, bool(document["one_machine"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unavailable(
            f"the list of the job's rollout services cannot be read: {error}",
            field="rollouts.gpus",
            hint="all nodes of the cluster must see the run directory",
        ) from error


@dataclass(frozen=True)
class PlacedAddress:
    """The address of the rollout service with the index `number` in the file.

    The address changes when the service moves.
    """

    file: Path
    number: int

    def __str__(self) -> str:
        return f"number {self.number} of this job"

    def locate(self) -> str:
        """Return the current HOST:PORT of the service.

        Raises Unavailable if the service does not run.
        """
        services, _ = read_placed(self.file)
        placed = services[self.number]
        if not placed.address:
            problem = (
                placed.problem or "the service waits for a node with free GPUs, or is starting"
            )
            raise Unavailable(
                f"rollout service {self} does not run: {problem}",
                field="rollouts.gpus",
                hint=f"read its log {self.file.with_name(f'rollouts-{self.number}.log')}",
            )
        return placed.address

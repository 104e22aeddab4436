"""The rollout services that the runner of a job has started on a cluster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from clients.runs.started_services import PlacedAddress, read_placed
from protos.errors import DistillError, InvalidInput
from student_trainer.parallel.launcher import is_main_process

_POLL_SECONDS = 0.5
_STRAGGLER_SECONDS = 60.0


class PlacedServices:
    """The services that a file of the runner lists; see `clients/runs/started_services.py`.

    The runner starts them, restarts them and moves them to other nodes. The token is "", because
    each process of the trainer has a token from the runner.
    """

    token = ""

    def __init__(self, file: Path) -> None:
        self._file = file

    @property
    def on_one_machine(self) -> bool:
        """True if the services and all processes of the trainer run on one machine."""
        return read_placed(self._file)[1]

    def call_when_lost(self, call: Callable[[DistillError], None]) -> None:
        """Do nothing: a lost service may return, so orders wait for their `patience_seconds`."""

    def addresses(self) -> list[PlacedAddress]:
        """Wait until the services are ready, and return their addresses.

        After the first service is ready, the method waits at most 60 s for the others, which may be
        ready later. The result is empty on ranks other than 0. Raises InvalidInput if a service
        does not start, and Unavailable if the file cannot be read.
        """
        if not is_main_process():
            return []
        deadline = math.inf
        while True:
            services, _ = read_placed(self._file)
            ready = [bool(service.address) for service in services]
            if all(ready) or time.monotonic() > deadline:
                return [PlacedAddress(self._file, number) for number in range(len(services))]
            if any(ready):
                deadline = min(deadline, time.monotonic() + _STRAGGLER_SECONDS)
            for number, service in enumerate(services):
                if service.problem:
                    raise InvalidInput(
                        f"the rollout engine did not start: {service.problem}",
                        field="rollouts.engine",
                        hint=f"read its log {self._file.with_name(f'rollouts-{number}.log')}",
                    )
            time.sleep(_POLL_SECONDS)

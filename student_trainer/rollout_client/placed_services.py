"""The rollout services that the runner of a job has placed on a cluster, for the trainer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from clients.runs.placed_services import PlacedAddress, read_placed
from protos.errors import DistillError, InvalidInput
from student_trainer.parallel.launcher import is_main_process

_LOOK_SECONDS = 0.5
_OTHERS_SECONDS = 60.0


class PlacedServices:
    """The services that a file of the runner lists; see `clients/runs/placed_services.py`.

    The runner starts them, restarts them and moves them to other nodes. token: "", because the
    runner has given one to each process of the trainer.
    """

    token = ""

    def __init__(self, file: Path) -> None:
        self._file = file

    @property
    def on_one_machine(self) -> bool:
        """Whether the services and all processes of the trainer share a machine."""
        return read_placed(self._file)[1]

    def when_lost(self, call: Callable[[DistillError], None]) -> None:
        """Do nothing: a service that is lost may come back, so orders have their patience."""

    def addresses(self) -> list[PlacedAddress]:
        """Return the address of every service, once they are ready.

        Waits 60 s for others once the first is ready: they can join later. Empty on ranks other
        than 0. Raises InvalidInput if a service does not start, and Unavailable if the file cannot
        be read.
        """
        if not is_main_process():
            return []
        waits_until = math.inf
        while True:
            services, _ = read_placed(self._file)
            ready = [bool(service.address) for service in services]
            if all(ready) or time.monotonic() > waits_until:
                return [PlacedAddress(self._file, number) for number in range(len(services))]
            if any(ready):
                waits_until = min(waits_until, time.monotonic() + _OTHERS_SECONDS)
            for number, service in enumerate(services):
                if service.problem:
                    raise InvalidInput(
                        f"the rollout engine did not start: {service.problem}",
                        field="rollouts.engine",
                        hint=f"its log is {self._file.with_name(f'rollouts-{number}.log')}",
                    )
            time.sleep(_LOOK_SECONDS)

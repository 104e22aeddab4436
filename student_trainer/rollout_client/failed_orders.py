"""Lets orders fail if the services are lost, or if they take too long after a stop request.

Only the main process starts services and detects that a service will not be restarted. The clients
in the other processes would retry until `patience_seconds` have passed, and then raise another
error. So the main process writes the error to a file, and the other processes poll this file.

After a stop request, a job writes a last checkpoint, which waits for the rollouts of later steps.
An engine that hangs, or that samples long answers, could take longer than the time after which the
job server kills the trainer.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from clients.runs.directory import replace_file
from protos.errors import DistillError, Unavailable, error_of
from student_trainer.rollout_client.engine_client import EngineClient
from student_trainer.rollout_client.local_services import RolloutServices
from student_trainer.rollout_client.placed_services import PlacedServices
from student_trainer.teachers import stop_watch

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5


def fail_when_lost(
    service: RolloutServices | PlacedServices, client: EngineClient, file: Path, *, main: bool
) -> None:
    """If the services are lost, let the orders of `client` fail with the error of the services.

    - file: the file for the error, the same path in all processes of an attempt. It must not exist.
    - main: True if this process started the services.

    The other processes poll the file in a thread, which ends when the client is closed.
    """
    if not main:
        threading.Thread(
            target=_watch_file, args=(client, file), name="loss-watch", daemon=True
        ).start()
        return

    def announce_loss(error: DistillError) -> None:
        fields = {"message": error.message, "field": error.field, "hint": error.hint}
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, json.dumps({"code": error.code, **fields}))
        except OSError as fault:
            log.warning("the other processes are not told that the engines are lost: %s", fault)
        client.fail(error)

    service.call_when_lost(announce_loss)


def _watch_file(client: EngineClient, file: Path) -> None:
    while not client.is_closed:
        if file.exists():
            client.fail(error_of(**json.loads(file.read_text())))
            return
        time.sleep(_POLL_SECONDS)


def end_orders_after_stop(client: EngineClient, is_stop_requested: Callable[[], bool]) -> None:
    """Let the orders of `client` fail that are not complete 20 s after a stop request.

    `is_stop_requested`: a function that returns True after a stop request. A thread calls it until
    the client is closed. A resumed run samples the missing rollouts with the weights of its
    checkpoint.
    """

    def end_orders() -> bool:
        client.fail(
            Unavailable(
                f"the rollout engine has not finished {stop_watch.STOP_SECONDS:g} s after the job"
                " was asked to stop",
                hint="resume the job to sample the missing answers again",
            )
        )
        return True

    stop_watch.watch_stop(is_stop_requested, lambda: client.is_closed, end_orders)

"""Fails the orders of a job whose rollout services are lost, or that has a stop request.

Only the main process starts services and detects that they will not be restarted. Clients in the
other processes would retry until their patience ends, and then raise another error. The main
process therefore writes the error to a file, which the other processes poll.

After a stop request, a job writes a last checkpoint, which waits for the rollouts of later steps.
An engine that hangs, or samples long answers, could exceed the time after which a server kills the
trainer.
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
    """When the services are lost, fail the orders of `client` with their error.

    `file`: the same path in all processes of an attempt; must not exist. `main`: whether this
    process started the services. The other processes poll the file in a thread, which ends with the
    client.
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
    """Fail the orders of `client` that have not ended 20 s after a stop request.

    `is_stop_requested`: returns whether there is a stop request; called in a thread, which ends
    with the client. A resumed run samples the missing rollouts with the weights of its checkpoint.
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

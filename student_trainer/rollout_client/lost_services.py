"""Tells every process of the trainer that the rollout services of the job are lost.

Only the main process starts services, so only it learns that they will not be restarted. Clients in
the other processes would retry until their patience ends, and then raise another error. So the main
process writes the error to a file, which the other processes poll.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path

from clients.runs.directory import replace_file
from protos.errors import DistillError, error_of
from student_trainer.rollout_client.engine_client import EngineClient
from student_trainer.rollout_client.local_services import RolloutServices
from student_trainer.rollout_client.placed_services import PlacedServices

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5


def fail_when_lost(
    service: RolloutServices | PlacedServices, client: EngineClient, file: Path, *, main: bool
) -> None:
    """Fail the orders of `client` with the error of the services, once they are lost.

    `file`: the same in all processes of an attempt; does not exist yet. `main`: whether this is the
    process that started the services. The other processes poll the file in a thread, which ends
    with the client.
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

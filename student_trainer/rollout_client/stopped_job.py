"""Ends the orders of a job that is asked to stop, so that its last checkpoint is complete in time.

A checkpoint waits for the rollouts of later steps, and a step for its own. An engine that hangs, or
that samples long answers, would take longer than a server waits before it kills the trainer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from protos.errors import Unavailable
from student_trainer.rollout_client.engine_client import EngineClient

# A server kills a cancelled trainer after 60 s, and the checkpoint is still to be written.
STOP_SECONDS = 20.0
_PAUSE = 0.5  # seconds between two looks


def end_orders_after_stop(client: EngineClient, stop_asked: Callable[[], bool]) -> None:
    """Fail the orders of `client` that have not ended STOP_SECONDS after a request to stop.

    `stop_asked`: whether the job is asked to stop; called in a thread, which ends with the client.
    A run that resumes samples what is missing with the weights of its checkpoint.
    """

    def watch() -> None:
        asked_at: float | None = None
        while not client.is_closed:
            if asked_at is None and stop_asked():
                asked_at = time.monotonic()
            if asked_at is not None and time.monotonic() - asked_at >= STOP_SECONDS:
                client.fail(
                    Unavailable(
                        f"the rollout engine has not finished {STOP_SECONDS:g} s after the job was "
                        "asked to stop",
                        hint="resume the job: it samples the missing answers anew",
                    )
                )
                return
            time.sleep(_PAUSE)

    threading.Thread(target=watch, name="stop-watch", daemon=True).start()

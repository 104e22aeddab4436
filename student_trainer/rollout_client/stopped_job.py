"""Ends the orders of a job that is asked to stop, so that its last checkpoint is complete in time.

A checkpoint waits for the rollouts of later steps, and a step for its own rollouts. An engine that
hangs, or that samples long answers, could take longer than the time after which a server kills the
trainer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from protos.errors import Unavailable
from student_trainer.rollout_client.engine_client import EngineClient

# A server kills a cancelled trainer after 60 s, and writing the checkpoint takes time too.
STOP_SECONDS = 20.0
_POLL_SECONDS = 0.5


def end_orders_after_stop(client: EngineClient, is_stop_requested: Callable[[], bool]) -> None:
    """Fail the orders of `client` that have not ended STOP_SECONDS after a request to stop.

    `is_stop_requested`: whether the job is asked to stop; called in a thread, which ends with the
    client. A resumed run samples the missing rollouts with the weights of its checkpoint.
    """

    def watch() -> None:
        requested_at: float | None = None
        while not client.is_closed:
            if requested_at is None and is_stop_requested():
                requested_at = time.monotonic()
            if requested_at is not None and time.monotonic() - requested_at >= STOP_SECONDS:
                client.fail(
                    Unavailable(
                        f"the rollout engine has not finished {STOP_SECONDS:g} s after the job was "
                        "asked to stop",
                        hint="resume the job: it samples the missing answers anew",
                    )
                )
                return
            time.sleep(_POLL_SECONDS)

    threading.Thread(target=watch, name="stop-watch", daemon=True).start()

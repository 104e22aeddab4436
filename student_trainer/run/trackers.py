"""Trackers, which receive the metrics in addition to metrics.jsonl: TensorBoard, Weights & Biases
and trackio.

Trackers are third-party code, and often need a third-party server. Each tracker runs in a thread of
its own, for which training never waits. If a tracker fails, a warning is logged, and the tracker is
not used any more.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

from clients.config.tables.common import TrackConfig
from clients.runs.directory import RunDirectory
from clients.runs.metrics_file import Tracker

log = logging.getLogger(__name__)

# Time limit for a tracker to send its last values; then the trainer ends without these values.
SECONDS_TO_CLOSE = 30.0
_SECONDS_TO_START = 30.0


class ThreadedTracker:
    """Runs a tracker in a separate thread. Its methods raise no errors, and only `close` waits."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        """Start the thread, which creates the tracker with `make`.

        `name`: the name of the tracker in log messages.
        """
        self._name = name
        self._make = make
        self._steps: SimpleQueue[tuple[int, Mapping[str, float]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send_metrics, name=name, daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the values of a step for the tracker.

        If the tracker has failed, drop the values.
        """
        if self._thread.is_alive():
            self._steps.put((step, values))

    def close(self) -> None:
        """Send the queued values and end the thread. Waits at most SECONDS_TO_CLOSE."""
        self._steps.put(None)
        self._thread.join(SECONDS_TO_CLOSE)
        if self._thread.is_alive():
            log.warning(
                "%s did not finish within %g s; its last values may be missing",
                self._name,
                SECONDS_TO_CLOSE,
            )

    def _send_metrics(self) -> None:
        try:
            tracker = self._make()
            while (step_metrics := self._steps.get()) is not None:
                tracker.log(*step_metrics)
            tracker.close()
        except Exception as error:  # noqa: BLE001 (a tracker must not end the run)
            log.warning("%s failed; the run continues without it: %r", self._name, error)


class TensorBoard:
    """Writes TensorBoard event files into the run directory."""

    def __init__(self, run: RunDirectory, last_step: int | None) -> None:
        """Open the event file.

        `last_step`: the step from which the run resumes; TensorBoard then hides older values of
        later steps. None: a new run.
        """
        from torch.utils.tensorboard import SummaryWriter

        first_hidden_step = None if last_step is None else last_step + 1
        self._writer: Any = SummaryWriter(str(run.tensorboard), purge_step=first_hidden_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step, and flush the file."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WeightsAndBiases:
    """Sends metrics to Weights & Biases (W&B).

    The id of the W&B run is the id of the job, so a resumed job continues its W&B run. The
    environment variables of wandb, such as WANDB_MODE, apply.
    """

    def __init__(self, run: RunDirectory, project: str) -> None:
        """Connect to the server of W&B. Waits at most 30 s."""
        import wandb

        config = json.loads(run.job_json.read_text())
        self._run: Any = wandb.init(
            project=project,
            id=run.path.name,
            name=run.path.name,
            group=config["name"],
            config=config,
            resume="allow",
            dir=str(run.path),
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, init_timeout=_SECONDS_TO_START
            ),
        )
        # W&B's own steps only grow, but a run that resumes repeats steps: plot over "step".
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Finish the run, which sends the last values."""
        self._run.finish()


class Trackio:
    """Writes metrics to trackio on this machine; `trackio show` opens its dashboard."""

    def __init__(self, run: RunDirectory, project: str) -> None:
        import trackio

        config = json.loads(run.job_json.read_text())
        self._run: Any = trackio.init(
            project=project,
            name=run.path.name,
            group=config["name"],
            config=config,
            resume="allow",
            embed=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run, which sends the last values."""
        self._run.finish()


def start_trackers(
    track: TrackConfig, run: RunDirectory, last_step: int | None
) -> list[ThreadedTracker]:
    """Start the trackers that the job's table `track` selects.

    `last_step`: the step from which the run resumes; None for a new run.
    """
    wandb, trackio = track.wandb, track.trackio
    trackers = []
    if track.tensorboard:
        trackers.append(ThreadedTracker("tensorboard", lambda: TensorBoard(run, last_step)))
    if wandb is not None:
        trackers.append(ThreadedTracker("wandb", lambda: WeightsAndBiases(run, wandb.project)))
    if trackio is not None:
        trackers.append(ThreadedTracker("trackio", lambda: Trackio(run, trackio.project)))
    return trackers

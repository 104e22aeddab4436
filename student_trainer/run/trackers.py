"""Where metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, trackio.

A tracker is somebody else's code and often somebody else's server: it works in a thread of its own,
which the training never waits for, and the first thing that it raises is told and is its last.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

from clients.config.common import TrackConfig
from clients.runs.directory import RunDirectory
from clients.runs.metrics_writer import Tracker

log = logging.getLogger(__name__)

# What a tracker gets to send its last numbers before the trainer ends without it.
SECONDS_TO_CLOSE = 30.0
_SECONDS_TO_START = 30.0


class Apart:
    """A tracker in a thread of its own. Never raises and never waits, but in `close`."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self._name = name
        self._make = make
        self._steps: SimpleQueue[tuple[int, Mapping[str, float]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._thread.is_alive():
            self._steps.put((step, values))

    def close(self) -> None:
        self._steps.put(None)
        self._thread.join(SECONDS_TO_CLOSE)
        if self._thread.is_alive():
            log.warning("%s is not done after %g s and is left", self._name, SECONDS_TO_CLOSE)

    def _work(self) -> None:
        try:
            tracker = self._make()
            while (item := self._steps.get()) is not None:
                tracker.log(*item)
            tracker.close()
        except Exception as error:
            log.warning("%s failed, the run goes on without it: %r", self._name, error)


class TensorBoard:
    """Files in the run directory."""

    def __init__(self, run: RunDirectory, last_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if last_step is None else last_step + 1
        self._writer: Any = SummaryWriter(str(run.tensorboard), purge_step=purge)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Its id is the job's, so a resumed job joins its run; WANDB_MODE and the like are heeded."""

    def __init__(self, run: RunDirectory, project: str) -> None:
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
        # Its own steps only grow; a job that resumes from an earlier checkpoint goes back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Local-first: `trackio show` is the dashboard."""

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
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def start_trackers(track: TrackConfig, run: RunDirectory, last_step: int | None) -> list[Apart]:
    """Those that the job asks for. `last_step`: the one that it goes on from."""
    wandb, trackio = track.wandb, track.trackio
    found = []
    if track.tensorboard:
        found.append(Apart("tensorboard", lambda: TensorBoard(run, last_step)))
    if wandb is not None:
        found.append(Apart("wandb", lambda: WeightsAndBiases(run, wandb.project)))
    if trackio is not None:
        found.append(Apart("trackio", lambda: Trackio(run, trackio.project)))
    return found

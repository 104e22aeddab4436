"""Reads the state of an active job from its runner and files. Blocking: call it in a thread."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from clients.data.outside import open_regular
from clients.jobs.job import Job, JobState
from clients.runs.directory import Control, RunDirectory, Status
from clients.runs.metrics_file import MetricsTail, Point
from distill_server.jobs.store import Change
from distill_server.runners.interface import Outcome, Runner, Running

# One lock for each run directory, held from the read of control.json to the write that follows.
_CONTROL_LOCKS: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
_LOG_TAIL_BYTES, _LOG_TAIL_LINES, _LOG_LINE_CHARS = 4096, 5, 200


def status_of(run: RunDirectory, attempt: int) -> Status | None:
    """Return the status of this attempt's trainer.

    None if the file is missing, unreadable, or was written by another attempt.
    """
    status = run.read_status()
    return status if status is not None and status.attempt == attempt else None


def progress_changes(
    job: Job, status: Status | None, points: Sequence[Point], runner_phase: str = ""
) -> list[Change]:
    """Return the changes since the last poll of a PREPARING, RUNNING or CANCELLING job.

    `points` are the new metrics. `runner_phase`, if any, replaces the trainer's phase.
    """
    changes = []
    if status is not None and status.max_steps and not job.max_steps:
        changes.append(Change(max_steps=status.max_steps))
    phase = runner_phase or (status.phase if status is not None else job.phase)
    has_started = bool(points) or (status is not None and bool(status.phase or status.step))
    if job.state is JobState.PREPARING and has_started:
        changes.append(Change(JobState.RUNNING, phase=phase))
    elif phase != job.phase:
        changes.append(Change(phase=phase))
    changes += [Change(step=point.step, metrics=point.metrics) for point in points]
    return changes


@dataclass(frozen=True)
class Observation:
    """The state of an attempt.

    - points: the steps since the last observation, with their metrics.
    - control: the content of control.json.
    - log_end: the last lines of the log if the attempt has ended, else "".
    """

    outcome: Outcome
    status: Status | None
    points: Sequence[Point]
    control: Control = field(default_factory=Control)
    log_end: str = ""


def observe(
    runner: Runner,
    run: RunDirectory,
    attempt: int,
    tail: MetricsTail,
    *,
    is_stopping: bool,
    is_cancel: bool,
) -> Observation:
    """Poll the runner, then read the files. So the files of an attempt that has ended are complete.

    - is_stopping: True if the trainer must stop. If control.json has no request to stop, the
      request is written again.
    - is_cancel: True if the reason of the stop is a cancel by a user.
    """
    outcome = runner.poll(run, attempt)
    status = status_of(run, attempt)
    if isinstance(outcome, Running):
        control = run.read_control()
        if is_stopping and not control.stop:
            _repeat_stop_request(runner, run, attempt, is_cancel=is_cancel)
        return Observation(outcome, status, tail.read(), control)
    log_end = _last_lines(run.log_file(attempt))
    return Observation(outcome, status, tail.read_all(), run.read_control(), log_end)


def request_stop(run: RunDirectory, *, now: bool, cancelled_attempt: int = 0) -> None:
    """Write the request to stop to control.json. Raises OSError if that fails.

    `cancelled_attempt`: the attempt that a user has cancelled; 0 if the server stops the trainer.
    """
    if not run.path.is_dir():
        # The directory was removed by hand. The scheduler kills the trainer after a grace period.
        return
    with _CONTROL_LOCKS[str(run.path)]:
        earlier = run.read_control()
        # Never change "now" back to "checkpoint": the trainer may already be stopping.
        is_now = now or earlier.stop == "now"
        cancelled_attempt = cancelled_attempt or earlier.cancelled_attempt
        control = Control("now" if is_now else "checkpoint", cancelled_attempt)
        if control != earlier:
            run.write_control(control)


def _repeat_stop_request(
    runner: Runner, run: RunDirectory, attempt: int, *, is_cancel: bool
) -> None:
    """Write the request to stop to control.json again. If this fails, send SIGTERM."""
    try:
        request_stop(run, now=False, cancelled_attempt=attempt if is_cancel else 0)
    except OSError:
        with suppress(OSError):
            runner.stop(run, attempt, now=False)


def _last_lines(path: Path) -> str:
    """Return the last lines of a log, short enough for a job's reason; "" if there is no log."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.rstrip()[:_LOG_LINE_CHARS] for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-_LOG_TAIL_LINES:])

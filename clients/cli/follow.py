"""Turns the files of a run directory, as a trainer writes them, into the events of a job."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from clients.jobs import TERMINAL, JobEvent, JobState
from clients.run_directory import RunDirectory, Status, Verdict

_STATES = {
    "running": JobState.RUNNING,
    "succeeded": JobState.SUCCEEDED,
    "failed": JobState.FAILED,
    "cancelled": JobState.CANCELLED,
}


class RunFollower:
    """Reads what is new of one attempt at each `poll`; survives that its trainer rewrites
    metrics.jsonl.
    """

    def __init__(self, run: RunDirectory, attempt: int, max_steps: int) -> None:
        self._run = run
        self._attempt = attempt
        self._max_steps = max_steps
        self._status = Status(attempt=attempt, verdict="running", phase="starting")
        self._inode = self._offset = 0
        # The newest step told: a rewritten file repeats older ones.
        self._newest = -1
        self._seq = 0

    @property
    def over(self) -> bool:
        return _state(self._status) in TERMINAL

    def poll(self) -> Iterator[JobEvent]:
        # The status first: what it announces as over has all of its metrics on disk.
        status = self._run.read_status()
        for metrics in self._new_lines():
            yield self._event(self._status, metrics)
        if status is not None and status.attempt == self._attempt and status != self._status:
            told = _state(self._status), self._status.phase, self._status.reason
            self._status = status
            if (_state(status), status.phase, status.reason) != told:
                yield self._event(status, {})

    def died(self, reason: str, state: JobState = JobState.FAILED) -> JobEvent:
        """The last event of a trainer that could not say its last word itself."""
        verdict: Verdict = "cancelled" if state is JobState.CANCELLED else "failed"
        step = max(self._newest, 0)
        return self._event(
            Status(self._attempt, verdict, self._status.phase, step, self._max_steps, reason), {}
        )

    def _new_lines(self) -> Iterator[Mapping[str, Any]]:
        try:
            with self._run.metrics.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset = found.st_ino, 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            metrics = json.loads(line)
            step = metrics.get("step", 0)
            if metrics.get("attempt", 1) == self._attempt and step > self._newest:
                self._newest = step
                yield metrics

    def _event(self, status: Status, metrics: Mapping[str, Any]) -> JobEvent:
        self._seq += 1
        return JobEvent(
            seq=self._seq,
            time=time.time(),
            state=_state(status),
            reason=status.reason,
            phase=status.phase,
            attempt=metrics.get("attempt", status.attempt),
            step=metrics.get("step", max(status.step, self._newest)),
            max_steps=status.max_steps or self._max_steps,
            metrics={
                name: float(value)
                for name, value in metrics.items()
                if name not in ("attempt", "step") and isinstance(value, int | float)
            },
        )


def _state(status: Status) -> JobState:
    if status.verdict == "running" and status.phase in ("", "starting", "preflight"):
        return JobState.PREPARING
    return _STATES[status.verdict]

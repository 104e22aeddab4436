"""JobView: the progress of a job, collected from its events, for all displays."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from clients.jobs.job import JobEvent, JobState

# Number of steps over which the speed is averaged.
WINDOW = 40
# Labels and metrics of the KL. A store without tail samples yields only a lower bound of the KL; a
# job with mixed training has both metrics, over different tokens.
KL = {"kl": "kl/teacher", "kl bound": "kl/teacher_bound"}


@dataclass
class JobView:
    """The current state of a job, and its history of KL and evaluations, built by `add`.

    One thread calls `add`. Another thread may read the fields for a display.
    """

    job_id: str
    state: JobState = JobState.QUEUED
    phase: str = ""
    reason: str = ""
    attempt: int = 1
    step: int = 0
    max_steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    kl_history: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    _clock: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, event: JobEvent) -> None:
        """Update the view with the next event. Events must arrive in order of `seq`."""
        if event.attempt != self.attempt:
            self._clock.clear()
        self.state, self.phase, self.reason = event.state, event.phase, event.reason
        self.attempt = event.attempt
        self.step = event.step
        self.max_steps = event.max_steps or self.max_steps
        if event.metrics:
            self._add_step(event)

    def _add_step(self, event: JobEvent) -> None:
        self.metrics.update(event.metrics)
        self._clock.append((event.step, event.time))
        if labelled_kl := kl_of(event.metrics):
            self.kl_history.append(labelled_kl[1])
        if held_out_metrics := evaluation(event.metrics):
            self.evaluations.append((event.step, held_out_metrics))

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the last step; None if unknown.

        The estimate uses the speed of recent steps.
        """
        clock = list(self._clock)  # a copy, because a live display reads it from another thread
        if len(clock) < 2 or self.state is not JobState.RUNNING:
            return None
        (first_step, first_time), (last_step, last_time) = clock[0], clock[-1]
        if last_step <= first_step or last_time <= first_time:
            return None
        return (
            (last_time - first_time) / (last_step - first_step) * max(self.max_steps - last_step, 0)
        )

    def facts(self) -> list[tuple[str, str]]:
        """Return texts about the newest step for a display, as (label, text) pairs."""
        metrics = self.metrics
        texts = [
            (label, f"{metrics[name]:{spec}}")
            for label, name, spec in (
                ("loss", "loss", ".4g"),
                *((label, name, ".4g") for label, name in KL.items()),
                ("tok/s", "tokens_per_sec", ".0f"),
            )
            if name in metrics
        ]
        if "bytes" in metrics:
            texts.append(("stored", size(metrics["bytes"])))
        if metrics.get("time/step") and "time/teacher_wait" in metrics:
            texts.append(("wait", f"{metrics['time/teacher_wait'] / metrics['time/step']:.0%}"))
        if self.seconds_left is not None:
            texts.append(("eta", duration(self.seconds_left)))
        return texts


def describe_state(state: str, phase: str) -> str:
    """Return the state and the phase of a job as one text, such as `RUNNING training`."""
    return f"{state} {phase}".rstrip()


def kl_of(metrics: Mapping[str, float]) -> tuple[str, float] | None:
    """Return (label, value) of the KL or of its lower bound; None if neither was measured."""
    return next(((label, metrics[name]) for label, name in KL.items() if name in metrics), None)


def evaluation(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the held-out metrics of a step without their standard errors.

    Their names start with `eval/`. They are in alphabetical order, because the map in a message of
    the server has no order.
    """
    return {
        name: value
        for name, value in sorted(metrics.items())
        if name.startswith("eval/") and not name.endswith("_stderr")
    }


def sparkline(history: Sequence[float], *, width: int = 60, unicode: bool = True) -> str:
    """Draw a series of values as a line of at most `width` characters.

    Each character shows the mean of a part of the series. All parts have the same length.
    """
    size = max(1, len(history) / width)
    parts = (
        history[int(index * size) : int((index + 1) * size)]
        for index in range(round(len(history) / size))
    )
    values = [sum(part) / len(part) for part in parts]
    levels = "".join(map(chr, range(0x2581, 0x2589))) if unicode else "_.-~=+*#"
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((value - low) * scale)] for value in values)


def size(count: float) -> str:
    """Format a number of bytes, such as `512 B`, `1.2 MiB` or `340 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def duration(seconds: float) -> str:
    """Format a number of seconds, such as `42s`, `3m20s` or `2h05m`."""
    total_seconds = round(seconds)
    if total_seconds < 60:
        return f"{total_seconds}s"
    minutes, remaining_seconds = divmod(total_seconds, 60)
    if minutes < 60:
        return f"{minutes}m{remaining_seconds:02}s"
    return f"{minutes // 60}h{minutes % 60:02}m"

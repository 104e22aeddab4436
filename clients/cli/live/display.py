"""Displays of a running job: a live block on a terminal, otherwise plain lines or JSON Lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from clients.cli.output import Output
from clients.jobs.display.lines import PlainLines, line_of
from clients.jobs.job import JobEvent, JobState, format_time
from clients.jobs.view import JobView, describe_state, evaluation, sparkline
from protos.errors import ExitCode
from protos.program.logs import plain

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

EXIT_CODES = {
    JobState.SUCCEEDED: ExitCode.OK,
    JobState.FAILED: ExitCode.JOB_FAILED,
    JobState.CANCELLED: ExitCode.JOB_CANCELLED,
}


class Display(Protocol):
    """An object that shows the events of a job when they arrive."""

    def show(self, event: JobEvent) -> None:
        """Show one event. The caller has already added the event to the JobView."""
        ...


@contextmanager
def display(output: Output, progress: JobView) -> Iterator[Display]:
    """Yield the display that fits the output settings: JSON Lines, a live block, or plain lines.

    `progress`: the state of the job that the display shows. The caller adds each event to
    `progress`, and then passes the event to `show`.
    """
    if output.as_json:
        yield JsonLines()
    elif output.live:
        from rich.live import Live

        console = output.console()
        block = LiveBlock(progress, console)
        with Live(get_renderable=block.render, console=console, refresh_per_second=4):
            yield block
    else:
        yield PlainLines(progress, output.say)


class JsonLines:
    """Prints each event to stdout as one JSON object per line."""

    def show(self, event: JobEvent) -> None:
        """Print one event."""
        print(json.dumps({**asdict(event), "time": format_time(event.time)}), flush=True)


class LiveBlock:
    """A terminal block that is redrawn in place: progress bar, metrics and KL curve.

    Evaluations and state changes are printed above the block and remain visible.
    """

    def __init__(self, progress: JobView, console: Console) -> None:
        self._progress = progress
        self._console = console
        self._state: JobState | None = None

    def show(self, event: JobEvent) -> None:
        """Print a line above the block if the event is an evaluation or a change of state."""
        if event.state is not self._state:
            self._state = event.state
            self._console.print(line_of(self._progress, event), markup=False)
        elif evaluation_metrics := evaluation(event.metrics):
            # Only the evaluation: the block shows all other metrics.
            figures = "  ".join(
                f"{name} {value:<7.4g}" for name, value in evaluation_metrics.items()
            ).rstrip()
            self._console.print(f"step {event.step:>6}  {figures}", markup=False)

    def render(self) -> RenderableType:
        """Return the block for drawing. rich calls this method from its own thread, 4 times per
        second.
        """
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        job = self._progress
        bar = Table.grid(padding=(0, 1))
        width = max(10, min(50, self._console.width - 30))
        bar.add_row(
            ProgressBar(total=max(job.max_steps, 1), completed=job.step, width=width),
            f"{job.step}/{job.max_steps or '?'}",
        )
        numbers = Text("   ".join(f"{name} {value}" for name, value in job.facts()))
        curve = sparkline(job.kl_history, unicode="utf" in self._console.encoding.lower())
        state = Text(plain(describe_state(job.state, job.phase)), style="bold")
        return Group(Text(job.job_id) + Text("  ") + state, bar, numbers, Text(curve, style="cyan"))


def conclude(output: Output, job: JobView, **extra: Any) -> ExitCode:
    """Print the last line of a finished job, and return the exit code for its state.

    `extra`: more values to print, by name. With --json nothing is printed.
    """
    if not output.as_json:
        parts = [f"{job.job_id} {job.state}", f"{job.step}/{job.max_steps} steps"]
        if job.evaluations:
            parts += [f"{name} {value:.4g}" for name, value in job.evaluations[-1][1].items()]
        if job.reason:
            parts.append(job.reason)
        parts += [f"{name} {value}" for name, value in extra.items()]
        print(plain("  ".join(parts)), flush=True)
    return EXIT_CODES.get(job.state, ExitCode.JOB_FAILED)


def notify_terminal(text: str) -> None:
    """Ring the terminal's bell and send it a notification (OSC 9).

    Terminals such as iTerm2, WezTerm, kitty and Windows Terminal show the notification; others
    ignore the sequence. `text` is one line.
    """
    print(f"\a\033]9;{plain(text)}\033\\", end="", file=sys.stderr, flush=True)

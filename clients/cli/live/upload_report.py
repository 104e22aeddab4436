"""Tells how far the files of a job have been sent to its server."""

from __future__ import annotations

import time

from clients.cli.output import Output
from clients.jobs.upload import Progress

_PAUSE_SECONDS = 10.0


class UploadReport:
    """Prints a line when the sending of a file or directory begins and ends, and every 10 s."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._next = 0.0

    def __call__(self, progress: Progress) -> None:
        """Print the progress if it is time to."""
        whole = progress.sent == progress.size
        if not (progress.begins or whole or time.monotonic() >= self._next):
            return
        self._next = time.monotonic() + _PAUSE_SECONDS
        text = f"{size_of(progress.sent)} of {size_of(progress.size)} sent"
        if progress.begins and whole:
            text = f"the server has its {size_of(progress.size)}"
        self._output.say(f"{progress.key}: {text}")


def size_of(count: int) -> str:
    """Return a number of bytes for people, such as `1.2 GB`."""
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"

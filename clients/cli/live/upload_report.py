"""Prints the progress of uploading the files of a job to its server."""

from __future__ import annotations

import time

from clients.cli.output import Output
from clients.jobs.upload import UploadProgress

_PAUSE_SECONDS = 10.0


class UploadReport:
    """Prints a line when the upload of a file or directory begins and ends, and every 10 s."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._next_line_at = 0.0

    def __call__(self, progress: UploadProgress) -> None:
        """Print the progress if it is time to."""
        is_complete = progress.sent_bytes == progress.size
        if not (progress.begins or is_complete or time.monotonic() >= self._next_line_at):
            return
        self._next_line_at = time.monotonic() + _PAUSE_SECONDS
        text = f"{format_size(progress.sent_bytes)} of {format_size(progress.size)} sent"
        if progress.begins and is_complete:
            text = f"the server has its {format_size(progress.size)}"
        self._output.say(f"{progress.key}: {text}")


def format_size(count: int) -> str:
    """Return a number of bytes for people, such as `1.2 GB`."""
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"

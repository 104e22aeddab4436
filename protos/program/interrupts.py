"""Exit code 130 without output for Ctrl-C while a command is still importing modules."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 130


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """End the process with exit code 130 at SIGINT, without a traceback.

    Use it around imports: an exception inside an import can be replaced by another one, or be
    printed by a C extension. Does nothing if SIGINT has another handler than Python's.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _exit_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_CODE)

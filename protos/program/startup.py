"""The start of a program before it imports its packages.

This module handles interrupts, checks of packages, the number of threads, and exit codes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType

from protos.errors import InvalidInput
from protos.operating_system import count_cores, require_linux


@contextmanager
def errors_as_exit() -> Iterator[None]:
    """If the block raises a DistillError, print it in one line, and exit with its exit code."""
    import typer

    from protos.errors import DistillError

    try:
        yield
    except DistillError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from error


def exit_unless_linux(program: str) -> None:
    """If the operating system is not Linux, print one sentence and exit."""
    try:
        require_linux(program)
    except InvalidInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(int(error.exit_code))


def require_packages(extra: str, program: str, only: Collection[str] | None = None) -> None:
    """If a package of `extra` is missing, print the install command and exit.

    `program`: the subject of the message. `only`: names of the packages to check; None: all of
    them.
    """
    from protos.extras import require_extra

    with errors_as_exit():
        require_extra(extra, program, only=only)


def set_threads(threads: int | None) -> None:
    """Set the number of CPU threads.

    The number is `threads`, else $OMP_NUM_THREADS, else half of the cores. Call this before torch
    is imported, because torch reads the number only once.
    """
    half = max(1, count_cores() // 2)
    os.environ["OMP_NUM_THREADS"] = str(threads or os.environ.get("OMP_NUM_THREADS") or half)


EXIT_CODE = 130


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """During the block, SIGINT ends the process with exit code 130 and without a traceback.

    Use this around imports: a KeyboardInterrupt during an import can be replaced by another
    exception, or be printed by a C extension. If SIGINT has another handler than Python's, nothing
    is changed.
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

"""The start of a program before the import of its packages: Ctrl-C, checks, threads, exit codes."""

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
    """Print a DistillError in one line, and exit with its exit code."""
    import typer

    from protos.errors import DistillError

    try:
        yield
    except DistillError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from error


def exit_unless_linux(program: str) -> None:
    """Exit with one sentence on another system than Linux."""
    try:
        require_linux(program)
    except InvalidInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(int(error.exit_code))


def require_packages(extra: str, program: str, only: Collection[str] | None = None) -> None:
    """Exit with the install command if a package of `extra`, or of `only`, is not installed."""
    from protos.extras import require_extra

    with errors_as_exit():
        require_extra(extra, program, only=only)


def set_threads(threads: int | None) -> None:
    """Set the number of CPU threads: `threads`, $OMP_NUM_THREADS, or half of the cores.

    Call it before torch is imported, because torch reads the number only once.
    """
    half = max(1, count_cores() // 2)
    os.environ["OMP_NUM_THREADS"] = str(threads or os.environ.get("OMP_NUM_THREADS") or half)


EXIT_CODE = 130


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """End the process with exit code 130 at SIGINT, without a traceback.

    Use it around imports, because a KeyboardInterrupt in an import can be replaced by another
    exception, or be printed by a C extension. Does nothing if SIGINT has another handler than
    Python's.
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

"""What a service does before it imports its packages: checks, CPU threads, errors as exit codes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import typer


@contextmanager
def errors_as_exit() -> Iterator[None]:
    """Print a DistillError in one line, and exit with its exit code."""
    from protos.errors import DistillError

    try:
        yield
    except DistillError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from error


def require_packages(extra: str, program: str, only: Collection[str] | None = None) -> None:
    """Exit with the install command if a package of `extra`, or of `only`, is not installed."""
    from protos.extras import require_extra

    with errors_as_exit():
        require_extra(extra, program, only=only)


def set_threads(threads: int | None) -> None:
    """Set the number of CPU threads: `threads`, $OMP_NUM_THREADS, or half of the cores.

    Call it before torch is imported, because torch reads the number only once.
    """
    half = max(1, len(os.sched_getaffinity(0)) // 2)
    os.environ["OMP_NUM_THREADS"] = str(threads or os.environ.get("OMP_NUM_THREADS") or half)

"""Command line options shared by the programs that run a model: model, device, threads, logs."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from protos.rpc.logs import LogFormat, LogLevel

ModelOption = Annotated[str, typer.Option(help="Hugging Face directory or hub id of the model.")]
DeviceOption = Annotated[str, typer.Option(help="Device of the model: auto, cpu, cuda or cuda:1.")]
TensorParallelSizeOption = Annotated[
    int, typer.Option(min=1, help="Number of GPUs that share each layer (vllm).")
]
GpuMemoryShareOption = Annotated[
    float, typer.Option(min=0.01, max=1.0, help="Share of each GPU's memory to use (vllm).")
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of CPU threads. Default: $OMP_NUM_THREADS, or else half of the cores."
    ),
]
LogFormatOption = Annotated[
    LogFormat, typer.Option(help="Format of log lines: text, or JSON objects.")
]
LogLevelOption = Annotated[
    LogLevel, typer.Option(help="Least severe level to log; debug adds a line per request.")
]


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

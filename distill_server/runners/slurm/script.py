"""The batch script of one attempt, which sbatch takes."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from distill_server.runners.order import TrainerOrder
from protos.errors import InvalidInput

_TEMPLATE = """\
#!/bin/sh
# One attempt of a job of distill-server. The server starts the next one: Slurm requeues none.
{options}
exec {driver}
"""
_OPTION = re.compile(r"[a-z][a-z-]*(=[^\n]*)?")
# The runner has its own, or cannot find a job that has them.
_RESERVED = frozenset(
    {"job-name", "requeue", "no-requeue", "export", "export-file", "output", "error", "open-mode"}
    | {"chdir", "ntasks", "cpus-per-task", "gpus-per-task", "array", "wrap", "wait", "clusters"}
)


def check_options(options: Sequence[str]) -> tuple[str, ...]:
    """Return the options of sbatch that a user has added, as NAME=VALUE or NAME.

    Raises InvalidInput if one is not of this form, or is set by the server.
    """
    for option in options:
        name = option.partition("=")[0]
        if not _OPTION.fullmatch(option):
            raise InvalidInput(
                f"{option!r} is not an option of sbatch",
                field="--slurm-option",
                hint="give its long name without dashes, for example partition=gpu",
            )
        # sbatch takes the beginning of a name too, if no option has that name.
        own = [one for one in sorted(_RESERVED) if one.startswith(name) and name != "gpus"]
        if own:
            raise InvalidInput(
                f"the server sets {own[0]} itself for each job",
                field="--slurm-option",
                hint="leave it out",
            )
    return tuple(options)


def job_script(name: str, order_file: Path, order: TrainerOrder, options: Sequence[str]) -> str:
    """Return the script that runs the driver of an attempt with its resources.

    The environment of the server is not exported: the order has that of the trainer. slurm.log,
    beside the order, gets what Slurm and the driver print.
    """
    log = str(order_file.with_name("slurm.log")).replace("%", "%%")
    chosen = [
        f"job-name={name}",
        "no-requeue",
        "export=NIL",
        f"output={log}",
        "open-mode=append",
        f"chdir={order.folder}",
        f"ntasks={order.processes}",
        f"cpus-per-task={order.cpus}",
    ]
    if order.gpus:
        chosen.append(f"gpus-per-task={order.gpus}")
    lines = [f"#SBATCH {_quoted(option)}" for option in [*chosen, *options]]
    driver = [sys.executable, "-P", "-m", "distill_server.runners.slurm.driver", str(order_file)]
    return _TEMPLATE.format(options="\n".join(lines), driver=shlex.join(driver))


def _quoted(option: str) -> str:
    name, equals, value = option.partition("=")
    return f"--{name}{equals}{shlex.quote(value) if value else ''}"

"""The batch script of one attempt, for sbatch."""

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
# The runner sets some of these options itself. With the other options, it would not find its job.
_RESERVED = frozenset(
    {"job-name", "requeue", "no-requeue", "export", "export-file", "output", "error", "open-mode"}
    | {"chdir", "ntasks", "cpus-per-task", "gpus-per-task", "array", "wrap", "wait", "clusters"}
)


def check_options(options: Sequence[str]) -> tuple[str, ...]:
    """Return the options of sbatch that a user has added, as NAME=VALUE or NAME.

    Raises InvalidInput if an option does not have this form, or is set by the server.
    """
    for option in options:
        name = option.partition("=")[0]
        if not _OPTION.fullmatch(option):
            raise InvalidInput(
                f"{option!r} is not an option of sbatch",
                field="--slurm-option",
                hint="give the long name of the option without dashes, for example partition=gpu",
            )
        # sbatch also accepts the beginning of an option's name.
        conflicts = [
            reserved
            for reserved in sorted(_RESERVED)
            if reserved.startswith(name) and name != "gpus"
        ]
        if conflicts:
            raise InvalidInput(
                f"the server sets {conflicts[0]} itself for each job",
                field="--slurm-option",
                hint="remove the option",
            )
    return tuple(options)


def job_script(name: str, order_file: Path, order: TrainerOrder, options: Sequence[str]) -> str:
    """Return the script that runs the driver of an attempt with its resources.

    The environment of the server is not exported, because the order contains the environment of the
    trainer. Slurm and the driver print to slurm.log, in the directory of the order.
    """
    log_pattern = str(order_file.with_name("slurm.log")).replace("%", "%%")
    server_options = [
        f"job-name={name}",
        "no-requeue",
        "export=NIL",
        f"output={log_pattern}",
        "open-mode=append",
        f"chdir={order.folder}",
        f"ntasks={order.processes}",
        f"cpus-per-task={order.cpus}",
    ]
    if order.gpus:
        server_options.append(f"gpus-per-task={order.gpus}")
    lines = [f"#SBATCH {_format_option(option)}" for option in [*server_options, *options]]
    driver = [sys.executable, "-P", "-m", "distill_server.runners.slurm.driver", str(order_file)]
    return _TEMPLATE.format(options="\n".join(lines), driver=shlex.join(driver))


def _format_option(option: str) -> str:
    name, equals, argument = option.partition("=")
    return f"--{name}{equals}{shlex.quote(argument) if argument else ''}"

"""Command-line options of `distill-server`: types, limits, and the texts of `--help`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class OnStop(StrEnum):
    """Whether the trainers continue or stop when the server stops at SIGTERM or SIGINT."""

    LEAVE = "leave"
    CHECKPOINT = "checkpoint"


RunsOption = Annotated[Path, typer.Option(help="Directory of all run directories.")]
PortOption = Annotated[
    int, typer.Option(help="Port of the gRPC service; 0: any free port.", min=0, max=65535)
]
SlotsOption = Annotated[
    int | None,
    typer.Option(help="Number of jobs that run at once. Default: --gpus, or else 1.", min=1),
]
GpusOption = Annotated[
    int | None,
    typer.Option(
        help="Number of GPUs to divide among the jobs. Default: not divided, each job sees all GPUs"
        " (on a cluster, no GPUs).",
        min=0,
    ),
]
CpusOption = Annotated[
    int,
    typer.Option(
        help="CPU threads of all jobs together; 0: --slots times --threads-per-job.", min=0
    ),
]
ThreadsPerJobOption = Annotated[
    int,
    typer.Option(
        help="CPU threads of a job that requests none; 0: --cpus (or half of this machine's CPUs)"
        " divided by --slots.",
        min=0,
    ),
]
MostQueuedOption = Annotated[
    int, typer.Option(help="Maximum number of queued jobs; further jobs are refused.", min=1)
]
RetriesOption = Annotated[
    int, typer.Option(help="Number of automatic retries of a job whose trainer died.", min=0)
]
BackoffOption = Annotated[
    float,
    typer.Option(help="Seconds before the first retry; doubles with each retry, to 360.", min=0),
]
GiveUpAfterOption = Annotated[
    float,
    typer.Option(
        metavar="HOURS",
        help="Hours that a job may wait without progress, for example for an unreachable teacher."
        " Then the job is FAILED.",
        min=0,
    ),
]
KeepDaysOption = Annotated[
    float | None,
    typer.Option(
        metavar="DAYS",
        help="Remove jobs, with their files, this many days after their end. Default: keep them."
        " Pinned jobs are kept, and so are jobs that a kept job depends on.",
        min=0,
    ),
]
OnStopOption = Annotated[
    OnStop,
    typer.Option(
        "--on-stop",
        help="What happens to running jobs at SIGTERM. leave: they continue, and the next server"
        " follows them. checkpoint: they write a checkpoint and end, and the next server continues"
        " them; for a server whose container ends with it.",
    ),
]
StopGraceOption = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="Maximum time that a server with --on-stop=checkpoint waits for the checkpoints.",
        min=0,
    ),
]
BackupOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Copy the job database to this new file and exit. A server may be running.",
    ),
]
ImportOption = Annotated[
    Path | None,
    typer.Option(
        "--import",
        metavar="DIR",
        help="Create jobs from the run directories in DIR, print the result for each, and exit. The"
        " directories are copied to --runs, unless DIR is --runs. No server may be running.",
    ),
]
DatabaseOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Job database. Default: server.sqlite in --runs. Not on a network file system.",
    ),
]
OnEndOption = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND",
        help="Run this command when a job is SUCCEEDED, FAILED or CANCELLED, for at most 30 s. Its"
        " standard input is the job's record as JSON. No shell interprets the command.",
    ),
]
RayOption = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Run the jobs on the Ray cluster with this dashboard, http://HOST:8265. --gpus and"
        " --cpus limit the resources of all jobs together.",
    ),
]
SlurmOption = Annotated[
    bool,
    typer.Option(
        "--slurm",
        help="Run the jobs with Slurm. This machine must be able to submit Slurm jobs. --gpus and"
        " --cpus limit the resources of all jobs together.",
    ),
]
SlurmOptionsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--slurm-option",
        metavar="NAME=VALUE",
        help="Option of sbatch for each job, such as partition=gpu; may be repeated.",
    ),
]
ExternalUrlOption = Annotated[
    str,
    typer.Option(
        "--external-url",
        metavar="URL",
        help="URL of the proxy through which users open the dashboard.",
    ),
]
DashboardPortOption = Annotated[
    int | None,
    typer.Option(
        metavar="PORT",
        help="Serve the web dashboard on this port; 0: any free port.",
        min=0,
        max=65535,
    ),
]

"""`distill-server`, or `python -m distill_server`."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli.listen_options import (
    HELP_OPTIONS,
    HostOption,
    InsecureOption,
    TlsCertOption,
    TlsClientCaOption,
    TlsKeyOption,
    TokenFileOption,
)
from clients.cli.version import VersionOption
from protos.errors import DistillError

if TYPE_CHECKING:
    from distill_server.dashboard.serve import Dashboard
    from distill_server.runners.interface import Runner
    from protos.auth.tls import TlsFiles

SlotsOption = Annotated[
    int | None,
    typer.Option(help="Jobs that run at once; by default one for each of --gpus.", min=1),
]
GpusOption = Annotated[
    int | None,
    typer.Option(help="Divide so many GPUs among the jobs; without it each sees all.", min=0),
]
CpusOption = Annotated[
    int, typer.Option(help="CPU threads of all jobs; 0: enough for every slot.", min=0)
]
ThreadsPerJobOption = Annotated[
    int,
    typer.Option(
        help="CPU threads of a job that asks for none; 0: half of the CPUs, shared.", min=0
    ),
]
MostQueuedOption = Annotated[
    int, typer.Option(help="Queued jobs beyond which no more are taken.", min=1)
]
RetriesOption = Annotated[
    int, typer.Option(help="How often a job whose trainer died is started again.", min=0)
]
BackoffOption = Annotated[
    float,
    typer.Option(help="Seconds before the first retry; doubled each time, to 360.", min=0),
]
DatabaseOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The job database; RUNS/server.sqlite without it. Never on a network file system.",
    ),
]
RayOption = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Run the jobs on the Ray cluster with this dashboard, http://HOST:8265; --gpus and"
        " --cpus are what they may hold of it together.",
    ),
]
DashboardPortOption = Annotated[
    int | None,
    typer.Option(
        metavar="PORT",
        help="Show the jobs to browsers there; 0: any free port.",
        min=0,
        max=65535,
    ),
]

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=HELP_OPTIONS,
)


@app.command()
def serve(
    runs: Annotated[Path, typer.Option(help="Directory of the jobs.")] = Path("runs"),
    port: Annotated[int, typer.Option(help="0: any free port.", min=0, max=65535)] = 50051,
    host: HostOption = "127.0.0.1",
    token_file: TokenFileOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_client_ca: TlsClientCaOption = None,
    insecure: InsecureOption = False,
    slots: SlotsOption = None,
    gpus: GpusOption = None,
    cpus: CpusOption = 0,
    threads_per_job: ThreadsPerJobOption = 0,
    most_queued: MostQueuedOption = 10_000,
    retries: RetriesOption = 3,
    backoff: BackoffOption = 10.0,
    dashboard: DashboardPortOption = None,
    database: DatabaseOption = None,
    ray: RayOption = None,
    version: VersionOption = False,
) -> None:
    """Accept distillation jobs, run them, and tell how they fare."""
    from distill_server.jobs.preflight import JobPreflight
    from distill_server.runners.machine import Machine, gpus_of_cluster, visible_gpus
    from distill_server.scheduler import Policy
    from distill_server.server import run_server
    from protos.auth.tls import TlsFiles
    from protos.rpc.server import read_endpoint

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    jobs = slots or gpus or 1
    here = (os.cpu_count() or 1) // 2 if ray is None else 0
    share = max(1, (cpus or here) // jobs)
    tls = TlsFiles(tls_cert, tls_key, tls_client_ca)
    try:
        machine = Machine(
            slots=jobs,
            cpus_per_job=threads_per_job or share,
            cpus=cpus,
            gpus=None if gpus is None else gpus_of_cluster(gpus) if ray else visible_gpus(gpus),
        )
        endpoint = read_endpoint(host, port, token_file, tls, insecure=insecure)
        asyncio.run(
            run_server(
                runs,
                database=database,
                dashboard=None if dashboard is None else _dashboard(dashboard, tls),
                endpoint=endpoint,
                runner=_runner(ray),
                policy=Policy(machine, most_queued, retries, backoff),
                preflight=JobPreflight(packages=ray is None),
                on_ready=lambda bound: print(
                    f"server listening on {endpoint.address(bound)}", flush=True
                ),
            )
        )
    except (DistillError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def _runner(ray: str | None) -> Runner:
    if ray is None:
        from distill_server.runners.local.runner import LocalRunner

        return LocalRunner()
    # Ray is imported only where it is wanted.
    from distill_server.runners.ray.cluster import RayCluster
    from distill_server.runners.ray.jobs import RayJobs
    from distill_server.runners.ray.runner import RayRunner

    return RayRunner(RayCluster(RayJobs(ray)))


def _dashboard(port: int, tls: TlsFiles) -> Dashboard:
    # The web server is imported only where it is wanted.
    from distill_server.dashboard.serve import Dashboard

    return Dashboard(port, tls, on_ready=lambda url: print(f"dashboard at {url}", flush=True))


def main() -> None:
    app()


if __name__ == "__main__":
    main()

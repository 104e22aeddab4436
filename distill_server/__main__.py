"""The command `distill-server`, also `python -m distill_server`."""

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
    typer.Option(help="Number of jobs that run at once. Default: --gpus, or else 1.", min=1),
]
GpusOption = Annotated[
    int | None,
    typer.Option(
        help="Number of GPUs to divide among the jobs. Default: not divided, each job sees all GPUs"
        " (none on a Ray cluster).",
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
DatabaseOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Job database. Default: server.sqlite in --runs. Not on a network file system.",
    ),
]
RayOption = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Run the jobs on the Ray cluster with this dashboard, http://HOST:8265. --gpus and"
        " --cpus limit what all jobs together use of the cluster.",
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

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=HELP_OPTIONS,
)


@app.command()
def serve(
    runs: Annotated[Path, typer.Option(help="Directory of all run directories.")] = Path("runs"),
    port: Annotated[
        int, typer.Option(help="Port of the gRPC service; 0: any free port.", min=0, max=65535)
    ] = 50051,
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
    """Accept distillation jobs, run them, and report their progress."""
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
    # Imported only for --ray: it needs the extra [ray].
    from distill_server.runners.ray.cluster import RayCluster
    from distill_server.runners.ray.jobs import RayJobs
    from distill_server.runners.ray.runner import RayRunner

    return RayRunner(RayCluster(RayJobs(ray)))


def _dashboard(port: int, tls: TlsFiles) -> Dashboard:
    # Imported only for --dashboard, so that a server without it does not load the web server.
    from distill_server.dashboard.serve import Dashboard

    return Dashboard(port, tls, on_ready=lambda url: print(f"dashboard at {url}", flush=True))


def main() -> None:
    """Run the command line; the entry point of `distill-server`."""
    app()


if __name__ == "__main__":
    main()

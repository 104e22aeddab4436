"""The command line of `distill-server`: starts the server, a backup or an import."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from distill_server import options
from protos.errors import DistillError, InvalidInput
from protos.program.logs import plain
from protos.program.options import (
    HELP_OPTIONS,
    HostOption,
    InsecureOption,
    MetricsHostOption,
    MetricsPortOption,
    TlsCertOption,
    TlsClientCaOption,
    TlsKeyOption,
    TokenFileOption,
    VersionOption,
)

if TYPE_CHECKING:
    from distill_server.dashboard.serve import Dashboard
    from distill_server.runners.interface import Runner
    from distill_server.runners.machine import Machine
    from distill_server.scheduler import Policy

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=HELP_OPTIONS,
)


@app.command()
def serve(
    runs: options.RunsOption = Path("runs"),
    port: options.PortOption = 50051,
    host: HostOption = "127.0.0.1",
    token_file: TokenFileOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_client_ca: TlsClientCaOption = None,
    insecure: InsecureOption = False,
    slots: options.SlotsOption = None,
    gpus: options.GpusOption = None,
    cpus: options.CpusOption = 0,
    threads_per_job: options.ThreadsPerJobOption = 0,
    most_queued: options.MostQueuedOption = 10_000,
    retries: options.RetriesOption = 3,
    backoff: options.BackoffOption = 10.0,
    give_up_after: options.GiveUpAfterOption = 24.0,
    keep_days: options.KeepDaysOption = None,
    on_stop: options.OnStopOption = options.OnStop.LEAVE,
    stop_grace: options.StopGraceOption = 60.0,
    backup: options.BackupOption = None,
    source: options.ImportOption = None,
    dashboard: options.DashboardPortOption = None,
    external_url: options.ExternalUrlOption = "",
    metrics_port: MetricsPortOption = 0,
    metrics_host: MetricsHostOption = "127.0.0.1",
    database: options.DatabaseOption = None,
    on_end: options.OnEndOption = None,
    ray: options.RayOption = None,
    slurm: options.SlurmOption = False,
    slurm_option: options.SlurmOptionsOption = None,
    version: VersionOption = False,
) -> None:
    """Accept distillation jobs, run them, and report their progress."""
    from distill_server.jobs.preflight import JobPreflight
    from distill_server.on_end import EndCommand
    from distill_server.server import run_server
    from protos.auth.tls import TlsFiles
    from protos.rpc.server import read_endpoint

    _start_logging()
    tls = TlsFiles(tls_cert, tls_key, tls_client_ca)
    with _report_errors():
        if backup is not None or source is not None:
            return _run_without_server(runs, database or runs / "server.sqlite", backup, source)
        machine = _create_machine(slots or gpus or 1, gpus, cpus, threads_per_job, ray, slurm)
        trainers_are_local = ray is None and not slurm
        if on_stop is options.OnStop.CHECKPOINT and not trainers_are_local:
            raise InvalidInput(
                "the jobs of a cluster continue without the server",
                field="--on-stop",
                hint="remove the option",
            )
        endpoint = read_endpoint(host, port, token_file, tls, insecure=insecure)
        asyncio.run(
            run_server(
                runs,
                database=database,
                keep_days=keep_days,
                stop_grace=stop_grace if on_stop is options.OnStop.CHECKPOINT else None,
                dashboard=_create_dashboard(dashboard, external_url),
                on_end=None if on_end is None else EndCommand(on_end),
                metrics=(metrics_host, metrics_port),
                endpoint=endpoint,
                runner=_create_runner(ray, slurm, slurm_option or []),
                policy=_create_policy(machine, most_queued, retries, backoff, give_up_after),
                preflight=JobPreflight(trainers_are_local=trainers_are_local),
                on_ready=lambda port: print(
                    "server listening on", endpoint.address(port), flush=True
                ),
            )
        )


@contextmanager
def _report_errors() -> Iterator[None]:
    """Print a DistillError of the block as one line, and exit with code 2."""
    try:
        yield
    except (DistillError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def _create_policy(
    machine: Machine, most_queued: int, retries: int, backoff: float, give_up_after: float
) -> Policy:
    from distill_server.scheduler import Policy

    return Policy(machine, most_queued, retries, backoff, give_up_after=give_up_after * 3600)


def _run_without_server(
    runs: Path, database: Path, backup: Path | None, source: Path | None
) -> None:
    """Make the backup of --backup first, then the import of --import; no server is started."""
    from distill_server.jobs.database import back_up

    if backup is not None:
        back_up(database, backup)
    if source is not None:
        _import_runs(runs, database, source)


def _import_runs(runs: Path, database: Path, source: Path) -> None:
    """Import the run directories in `source` and print a line for each of them.

    Exits with code 1 if the import refused a directory.
    """
    from distill_server.jobs.database import open_database
    from distill_server.jobs.runs_owner import own_runs
    from distill_server.retention.imports import import_runs

    outcomes: Counter[str] = Counter()
    runs.mkdir(parents=True, exist_ok=True)
    # The runs of a lost database become jobs of this database.
    take_over = source.resolve() == runs.resolve()
    with (
        open_database(database) as connection,
        own_runs(runs.resolve(), database, connection, take_over=take_over),
    ):
        for import_result in import_runs(connection, runs.resolve(), source):
            outcomes[import_result.outcome] += 1
            name, about = plain(import_result.name), plain(import_result.about)
            print(f"{import_result.outcome:<8} {name}: {about}", flush=True)
    counts = ("taken", "known", "refused")
    typer.echo(", ".join(f"{outcomes[name]} {name}" for name in counts), err=True)
    if outcomes["taken"]:
        typer.echo("--keep-days of a server counts from this import", err=True)
    if outcomes["refused"]:
        raise typer.Exit(1)


def _start_logging() -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("metrics_page", "file_watch"):  # the page's address, and files that were read
        logging.getLogger(f"protos.rpc.{name}").setLevel(logging.INFO)


def _create_machine(
    slots: int, gpus: int | None, cpus: int, threads_per_job: int, ray: str | None, slurm: bool
) -> Machine:
    from distill_server.runners.machine import (
        UNCOUNTED,
        Machine,
        gpus_of_cluster,
        visible_gpus,
    )

    on_cluster = slurm or ray is not None
    default_cpus = 0 if on_cluster else (os.cpu_count() or 1) // 2
    name_gpus = gpus_of_cluster if on_cluster else visible_gpus
    return Machine(
        slots=slots,
        cpus_per_job=threads_per_job or max(1, (cpus or default_cpus) // slots),
        cpus=cpus or (UNCOUNTED if on_cluster else 0),
        gpus=None if gpus is None else name_gpus(gpus),
        has_teachers=not on_cluster,
        places_engines=not slurm,
    )


def _create_runner(ray: str | None, slurm: bool, slurm_options: list[str]) -> Runner:
    if slurm and ray is not None:
        raise InvalidInput(
            "cannot be given with --ray", field="--slurm", hint="remove one of the two options"
        )
    if slurm_options and not slurm:
        raise InvalidInput("needs --slurm", field="--slurm-option", hint="add --slurm")
    if slurm:
        from distill_server.runners.cluster import Cluster
        from distill_server.runners.slurm.jobs import SlurmJobs
        from distill_server.runners.slurm.runner import PAUSE_SECONDS, SlurmRunner
        from distill_server.runners.slurm.script import check_options

        options = check_options(slurm_options)
        return SlurmRunner(Cluster(SlurmJobs(), "Slurm", PAUSE_SECONDS), options)
    if ray is None:
        from distill_server.runners.local.runner import LocalRunner

        return LocalRunner()
    # Imported only for --ray: it needs the extra [ray].
    from distill_server.runners.ray.jobs import RayJobs
    from distill_server.runners.ray.runner import RayCluster, RayRunner

    return RayRunner(RayCluster(RayJobs(ray)))


def _create_dashboard(port: int | None, external_url: str) -> Dashboard | None:
    if port is None:
        if external_url:
            raise InvalidInput(
                "needs a server with a dashboard",
                field="--external-url",
                hint="add --dashboard PORT, or remove the option",
            )
        return None
    # Imported only for --dashboard, so that a server without it does not load the web server.
    from distill_server.dashboard.serve import Dashboard, external_host

    external_host(external_url)
    return Dashboard(port, external_url, lambda url: print(f"dashboard at {url}", flush=True))

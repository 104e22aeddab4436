"""Builds and runs a server from its parts; `command.py` parses the command line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
from prometheus_client import CollectorRegistry

from distill_server.jobs.change_notifier import ChangeNotifier
from distill_server.jobs.control import JobControl
from distill_server.jobs.database import open_database
from distill_server.jobs.new_runs import settle_new_runs
from distill_server.jobs.preflight import Preflight
from distill_server.jobs.run_files import RunFiles
from distill_server.jobs.runs_owner import own_runs
from distill_server.jobs.store import JobStore
from distill_server.metrics import ServerMetrics
from distill_server.on_end import EndCommand
from distill_server.people.audit import AUDIT_FILE, Audit
from distill_server.people.quotas import Quotas, require_counted_gpus
from distill_server.places import Places
from distill_server.retention.keeper import Keeper
from distill_server.retention.removals import Removals
from distill_server.rpc.service import SERVICE, DistillService
from distill_server.rpc.streams import Streams
from distill_server.runners.interface import Runner
from distill_server.scheduler import Policy, Scheduler
from distill_server.uploads import Uploads, collect_garbage, named_uploads
from protos.auth.access import OnRefusal, Tokens
from protos.distill_pb2_grpc import add_DistillServicer_to_server
from protos.errors import InvalidInput
from protos.rpc.metrics_page import MetricsPage, metrics_page
from protos.rpc.server import ServerEndpoint, serve

if TYPE_CHECKING:
    from distill_server.dashboard.serve import Dashboard

_GRACE_SECONDS = 5.0
_COLLECT_SECONDS = 3600.0

log = logging.getLogger(__name__)


async def run_server(
    runs: Path,
    *,
    endpoint: ServerEndpoint,
    runner: Runner,
    policy: Policy,
    preflight: Preflight,
    on_ready: Callable[[int], None],
    dashboard: Dashboard | None = None,
    metrics: tuple[str, int] = ("127.0.0.1", 0),
    database: Path | None = None,
    on_end: EndCommand | None = None,
    keep_days: float | None = None,
    stop_grace: float | None = None,
) -> None:
    """Serve the jobs under `runs` until SIGTERM or SIGINT.

    Trainers keep running, and the next server on the same directory follows them.

    - stop_grace: at the end, the trainers have this many seconds to write a checkpoint and end;
      None: they are not stopped.
    - on_ready: called with the port once the server listens.
    - metrics: (host, port) of the metrics page.
    - database: path of the database; None means server.sqlite in `runs`.
    - on_end: called for ended jobs.
    - keep_days: ended jobs are removed after this many days; None means never.

    Raises WrongState if another server uses the database or `runs`, or if `runs` belongs to another
    database; InvalidInput if the port is taken or `runs` cannot be a directory.
    """

    def check_tokens(tokens: Tokens) -> None:
        require_counted_gpus(tokens.quotas, policy.machine.gpus is not None)

    check_tokens(endpoint.tokens)
    runs, notifier = _create_directory(runs), ChangeNotifier()
    database = database or runs / "server.sqlite"
    with open_database(database) as connection, own_runs(runs, database, connection):
        store = JobStore(connection, lambda job_id: _on_job_change(job_id, store, notifier, on_end))
        settle_new_runs(store, runs)
        files, tokens = RunFiles(), endpoint.tokens
        audit = Audit(database.with_name(AUDIT_FILE), tokens)
        quotas = Quotas(connection, store, lambda: tokens.quotas)
        scheduler = Scheduler(store, runs, runner, policy, quotas, preflight, files)
        control = JobControl(
            store,
            runs,
            scheduler.wake,
            machine=policy.machine,
            max_queued=policy.max_queued,
            preflight=preflight,
            files=files,
            stop_trainer=partial(runner.stop, now=False),
            let_wait=scheduler.waits.begin_at_submit,
            require_quota=quotas.require_gpus,
        )
        scheduler.store_late_cancels = control.store_late_cancels
        streams, uploads = Streams(store, runs, notifier, files), Uploads(runs)
        removals = Removals(connection, store, runs, files, notifier.notify)
        service = DistillService(
            store,
            runs,
            control,
            streams,
            removals,
            files=files,
            teachers=scheduler.teachers,
            uploads=uploads,
            audit=audit,
            tokens=tokens,
            read_places=lambda: Places(store, scheduler, policy.machine),
        )
        server_metrics = ServerMetrics(
            store, policy.machine, scheduler.teachers, runs, files, audit.refusals
        )
        page = _create_metrics_page(server_metrics)
        dashboard_context: contextlib.AbstractAsyncContextManager[Callable[[int], None]]
        dashboard_context = contextlib.nullcontext(lambda port: None)
        if dashboard is not None:
            dashboard_context = dashboard.serving(
                endpoint,
                runs,
                store,
                notifier=notifier,
                control=control,
                removals=removals,
                streams=streams,
                scheduler=scheduler,
                machine=policy.machine,
                registry=page.registry,
                audit=audit,
            )

        async def drain() -> None:
            page.stop()
            if stop_grace is not None:
                control.refuse_new_jobs()
                await scheduler.stop_trainers(stop_grace)

        async with dashboard_context as announce:
            ready = partial(_call_both, on_ready, announce)
            collect_uploads = partial(_collect_garbage, uploads, connection, files)
            keeper = Keeper(removals, keep_days, store.now, audit)
            tasks = (scheduler.run, keeper.run, collect_uploads)
            with metrics_page(page, metrics):
                await _serve_and_work(
                    service,
                    tasks,
                    endpoint,
                    page,
                    on_ready=ready,
                    drain=drain,
                    on_stop=notifier.close,
                    on_refusal=audit.record_refusal,
                    check_tokens=check_tokens,
                )


def _call_both(
    first_callback: Callable[[int], None], second_callback: Callable[[int], None], port: int
) -> None:
    first_callback(port)
    second_callback(port)


def _on_job_change(
    job_id: str, store: JobStore, notifier: ChangeNotifier, on_end: EndCommand | None
) -> None:
    """Notify the tasks that watch a job, and the command of --on-end, that the job has changed."""
    notifier.notify(job_id)
    if on_end is not None and store.has(job_id):
        on_end.on_job_change(store.job(job_id))


def _create_metrics_page(metrics: ServerMetrics) -> MetricsPage:
    registry = CollectorRegistry()
    registry.register(metrics)
    return MetricsPage(registry)


async def _collect_garbage(
    uploads: Uploads, connection: sqlite3.Connection, files: RunFiles
) -> None:
    """Remove the uploads that no job names, once an hour."""
    while True:
        try:
            await files.start(partial(collect_garbage, uploads, named_uploads(connection)))
        except Exception:
            log.exception("cannot remove unused uploads; retrying in %g s", _COLLECT_SECONDS)
        await asyncio.sleep(_COLLECT_SECONDS)


async def _serve_and_work(
    service: DistillService,
    coroutine_functions: Sequence[Callable[[], Coroutine[None, None, None]]],
    endpoint: ServerEndpoint,
    page: MetricsPage,
    *,
    on_ready: Callable[[int], None],
    drain: Callable[[], Awaitable[None]],
    on_stop: Callable[[], None],
    on_refusal: OnRefusal,
    check_tokens: Callable[[Tokens], None],
) -> None:
    """Serve until SIGTERM or SIGINT; run `coroutine_functions` as long as the port is bound."""
    page.follow(asyncio.get_running_loop())
    tasks: list[asyncio.Task[None]] = []

    def register(server: grpc.aio.Server) -> str:
        add_DistillServicer_to_server(service, server)
        return SERVICE

    def on_bound(port: int) -> None:
        # Called only once the port is bound: a server that cannot be reached must not start jobs.
        tasks.extend(
            asyncio.get_running_loop().create_task(coroutine_function())
            for coroutine_function in coroutine_functions
        )
        page.start()
        on_ready(port)

    await serve(
        register,
        endpoint,
        grace_seconds=_GRACE_SECONDS,
        on_ready=on_bound,
        drain=drain,
        on_stop=on_stop,
        on_refusal=on_refusal,
        check_tokens=check_tokens,
    )
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _create_directory(runs: Path) -> Path:
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(
            f"cannot create the directory {runs}: {(error.strerror or str(error)).lower()}",
            field="--runs",
            hint="name a directory that exists or that can be created",
        ) from error
    return runs.resolve()

"""The parts of a server put together; `__main__` reads the command line."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import grpc.aio

from distill_server.bells import Bells
from distill_server.control import JobControl
from distill_server.database import open_database
from distill_server.runner import LocalRunner
from distill_server.scheduler import Policy, Scheduler
from distill_server.service import SERVICE, DistillService
from distill_server.store import Store
from distill_server.streams import Streams
from protos.distill_pb2_grpc import add_DistillServicer_to_server
from protos.errors import InvalidInput
from protos.server import Endpoint, serve

_GRACE_SECONDS = 5.0


async def run_server(
    runs: Path,
    *,
    endpoint: Endpoint,
    runner: LocalRunner,
    policy: Policy,
    on_ready: Callable[[int], None],
) -> None:
    """Serve the jobs under `runs` until SIGTERM; trainers go on, and the next server finds them.

    `on_ready` gets the port. Raises WrongState when another server has `runs`, InvalidInput for a
    port that is taken.
    """
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(
            f"{runs} cannot be a directory: {(error.strerror or str(error)).lower()}",
            field="--runs",
            hint="name one that can be made, or that exists",
        ) from error
    runs = runs.resolve()
    bells = Bells()
    with open_database(runs / "server.sqlite") as connection:
        store = Store(connection, on_change=bells.ring)
        scheduler = Scheduler(store, runs, runner, policy)
        control = JobControl(store, runs, scheduler.wake)
        service = DistillService(store, runs, control, Streams(store, runs, bells))
        tasks: list[asyncio.Task[None]] = []

        def register(server: grpc.aio.Server) -> str:
            add_DistillServicer_to_server(service, server)
            return SERVICE

        def ready(bound: int) -> None:
            # Not before the port is ours: a server that cannot be reached must not start jobs.
            tasks.append(asyncio.get_running_loop().create_task(scheduler.run()))
            on_ready(bound)

        await serve(
            register,
            endpoint,
            grace_seconds=_GRACE_SECONDS,
            on_ready=ready,
            on_stop=bells.close,
        )
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

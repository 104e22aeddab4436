"""Starts the dashboard as a part of a server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry

from distill_server.dashboard.app import Pages, make_app
from distill_server.dashboard.teachers import Teachers
from distill_server.jobs.change_notifier import ChangeNotifier
from distill_server.jobs.control import JobControl
from distill_server.jobs.run_files import SharedReads
from distill_server.jobs.store import JobStore
from distill_server.people.audit import Audit
from distill_server.retention.removals import Removals
from distill_server.rpc.streams import Streams
from distill_server.runners.machine import Machine
from distill_server.scheduler import Scheduler
from protos.errors import InvalidInput
from protos.rpc.http_server import HttpLimits, bind, listening
from protos.rpc.server import ServerEndpoint


@dataclass(frozen=True)
class Dashboard:
    """The settings of the dashboard. It uses the address, tokens and TLS of the gRPC port.

    - port: 0 picks a free port.
    - external_url: URL of a proxy in front of the dashboard; "" if there is none.
    - on_ready: called with the URL for users once the server listens.
    - limits: maximum number of connections and timeouts of the dashboard's HTTP server. Each
      browser may open six connections.
    """

    port: int = 0
    external_url: str = ""
    on_ready: Callable[[str], None] = lambda url: None
    limits: HttpLimits = field(default_factory=HttpLimits)

    @contextlib.asynccontextmanager
    async def serving(
        self,
        endpoint: ServerEndpoint,
        runs: Path,
        store: JobStore,
        notifier: ChangeNotifier,
        control: JobControl,
        removals: Removals,
        streams: Streams,
        scheduler: Scheduler,
        machine: Machine,
        registry: CollectorRegistry,
        audit: Audit,
    ) -> AsyncIterator[Callable[[int], None]]:
        """Serve the dashboard within the block.

        Yields a function. When the gRPC server has bound its port, call this function with the
        port. Raises InvalidInput if the port is taken, or if other machines can reach the address
        without tokens and TLS (unless the endpoint is `insecure`).
        """
        endpoint.require_usable()
        pages = Pages(
            store=store,
            runs=runs,
            notifier=notifier,
            control=control,
            removals=removals,
            streams=streams,
            teachers=Teachers(store, scheduler.teachers),
            scheduler=scheduler,
            machine=machine,
            endpoint=endpoint,
            registry=registry,
            shared_reads=SharedReads(streams.files),
            audit=audit,
        )
        external = external_host(self.external_url)
        app = make_app(pages, tokens=endpoint.tokens, host=endpoint.host, external=external)
        with bind(endpoint.host, self.port, "--dashboard") as sock:
            async with listening(app, sock, endpoint.tls, self.limits):
                host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
                scheme = "https" if endpoint.tls else "http"
                url = self.external_url or f"{scheme}://{host}:{sock.getsockname()[1]}"

                def announce(grpc_port: int) -> None:
                    pages.grpc_port = grpc_port
                    self.on_ready(url)

                yield announce


def external_host(url: str) -> str:
    """Return the lower-case host name of an external URL; "" for "".

    Raises InvalidInput if `url` is not an http or https URL.
    """
    parts = urlsplit(url)
    if url and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise InvalidInput(
            f"{url!r} is not a URL",
            field="--external-url",
            hint="give the address that users open, such as https://distill.example/",
        )
    return parts.hostname or ""

"""Starts the dashboard as a part of a server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from distill_server.dashboard.app import Pages, make_app
from distill_server.dashboard.exposition import exposition
from distill_server.dashboard.listen import bind, listening
from distill_server.dashboard.teachers import Teachers
from distill_server.jobs.change_notifier import ChangeNotifier
from distill_server.jobs.control import JobControl
from distill_server.jobs.store import Store
from distill_server.rpc.streams import Streams
from protos.auth.tls import TlsFiles
from protos.rpc.server import Endpoint


@dataclass(frozen=True)
class Dashboard:
    """The settings of the dashboard. It uses the address, tokens and TLS of the gRPC port.

    `port` 0 picks a free port. `on_ready` is called with the URL once the server listens.
    """

    port: int = 0
    tls: TlsFiles = field(default_factory=TlsFiles)
    on_ready: Callable[[str], None] = lambda url: None

    @contextlib.asynccontextmanager
    async def serving(
        self,
        endpoint: Endpoint,
        runs: Path,
        store: Store,
        bells: ChangeNotifier,
        control: JobControl,
        streams: Streams,
        slots: int,
    ) -> AsyncIterator[str]:
        """Serve the dashboard within the block and yield its URL.

        Raises InvalidInput if the port is taken, or if other machines can reach the address without
        tokens and TLS (unless the endpoint is `insecure`).
        """
        endpoint.require_usable()
        pages = Pages(
            store=store,
            runs=runs,
            bells=bells,
            control=control,
            streams=streams,
            teachers=Teachers(store),
            exposition=exposition(store, slots),
            has_tokens=bool(endpoint.tokens),
        )
        app = make_app(pages, tokens=endpoint.tokens, host=endpoint.host)
        with bind(endpoint.host, self.port) as sock:
            async with listening(app, sock, self.tls):
                host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
                scheme = "https" if endpoint.tls else "http"
                yield f"{scheme}://{host}:{sock.getsockname()[1]}"

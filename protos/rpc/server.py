"""The common part of every gRPC server: endpoint, access control, health checks, and shutdown."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from protos.auth.access import (
    AccessControl,
    OnRefusal,
    Tokens,
    ignore_refusal,
    read_tokens,
)
from protos.auth.tls import ServerTls, TlsFiles
from protos.errors import InvalidInput
from protos.rpc.file_watch import WatchedFiles, watch_files
from protos.rpc.health import Health
from protos.rpc.ports import describe_listener
from protos.rpc.statuses import ErrorBoundary
from protos.rpc.transport import SERVER_OPTIONS, is_loopback

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerEndpoint:
    """The address of this machine at which a server listens, with its tokens and TLS credentials.

    Port 0 means any free port. `insecure`: True allows other machines to connect without tokens and
    TLS.
    """

    host: str = "127.0.0.1"
    port: int = 0
    tokens: Tokens = field(default_factory=Tokens)
    tls: ServerTls | None = None
    insecure: bool = False

    def require_usable(self) -> None:
        """Raise InvalidInput if the server could not start at this endpoint.

        This is so if other machines could call without tokens and TLS, or if another program uses
        the port. The check comes before the server loads a model for minutes. `serve` checks the
        port again when it binds the port.
        """
        if not is_loopback(self.host) and not self.insecure and not (self.tokens and self.tls):
            raise InvalidInput(
                f"refusing to listen on {self.host} without tokens and TLS:"
                " other machines can reach this address",
                field="--host",
                hint="give --token-file, --tls-cert and --tls-key,"
                " or use 127.0.0.1 and an SSH tunnel",
            )
        if self.port:
            require_free_port(self.host, self.port)

    def address(self, port: int) -> str:
        """Return the address that clients use. `port`: the port that the server has bound."""
        target = _format_target(self.host, port)
        return f"https://{target}" if self.tls else target


def read_endpoint(
    host: str, port: int, token_file: Path | None, tls: TlsFiles, *, insecure: bool
) -> ServerEndpoint:
    """Create the endpoint from command-line options.

    Raises InvalidInput that names a wrong option.
    """
    server_tls = None if tls == TlsFiles() else ServerTls(tls)
    return ServerEndpoint(host, port, read_tokens(token_file), server_tls, insecure)


def require_free_port(host: str, port: int, option: str = "--port") -> None:
    """Raise InvalidInput if another program uses the port, or if this machine has no address
    `host`.

    `option`: the command-line option that the error names.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise InvalidInput(
                f"cannot listen on {host}: {error.strerror}",
                field="--host",
                hint="give an address of this machine",
            ) from error
        raise _port_taken(port, option) from error


def _port_taken(port: int, option: str = "--port") -> InvalidInput:
    listener = describe_listener(port)
    return InvalidInput(
        f"port {port} is taken" + (f" by {listener}" if listener else ""),
        field=option,
        hint="choose another port, or 0 for any free port, and give clients the new address",
    )


async def serve(
    register: Callable[[grpc.aio.Server], str],
    endpoint: ServerEndpoint,
    *,
    grace_seconds: float,
    on_ready: Callable[[int], None],
    on_stop: Callable[[], None] = lambda: None,
    stop: asyncio.Event | None = None,
    prepare: Callable[[], Awaitable[None]] | None = None,
    drain: Callable[[], Awaitable[None]] | None = None,
    on_refusal: OnRefusal = ignore_refusal,
    check_tokens: Callable[[Tokens], None] = lambda tokens: None,
) -> signal.Signals | None:
    """Serve until SIGTERM or SIGINT, or until `stop` is set. Then shut down.

    At shutdown, running calls get `grace_seconds` seconds to finish. The files of tokens and TLS
    are read again when they change, and at SIGHUP. Returns the first signal; None without a signal.

    These arguments are functions of the service:

    - `register`: adds the service to the server, and returns the full name of the service for
      health checks
    - `prepare`: prepares the service, for example loads a model. Meanwhile the server listens, and
      health checks return NOT_SERVING. It should end early when `stop` is set. An error ends the
      server and is raised here.
    - `on_ready`: announces the service. Its argument is the port. It is not called if the server
      was stopped before.
    - `on_refusal`: records a call that was refused for its token; see `AccessControl`
    - `check_tokens`: checks the tokens of a changed file, on a thread. It raises a DistillError to
      keep the old tokens.
    - `drain`: finishes the work of the service before the shutdown. Meanwhile calls are still
      answered, and health checks return NOT_SERVING. A second signal cancels it.
    - `on_stop`: ends streams that would not end by themselves, at the beginning of the shutdown

    Raises InvalidInput if another program uses the port, or if other machines could call without
    tokens and TLS. Must run in the main thread, because it installs signal handlers.
    """
    endpoint.require_usable()
    stop, second_signal = stop or asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    signals: list[signal.Signals] = []

    def request_stop(signum: signal.Signals) -> None:
        signals.append(signum)
        (second_signal if stop.is_set() else stop).set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, request_stop, signum)

    interceptors = [ErrorBoundary(), AccessControl(endpoint.tokens, on_refusal)]
    server = grpc.aio.server(
        options=[*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", _max_connections())],
        interceptors=interceptors,
    )
    health = Health(register(server))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    bound_port = _bind_port(server, endpoint)
    await server.start()
    _warn_if_open(endpoint)
    with _reload_changed_files(endpoint, check_tokens):
        try:
            if prepare:
                await prepare()
            if not stop.is_set():
                health.start()
                on_ready(bound_port)
            await stop.wait()
            health.stop()
            if drain:
                await _drain_until(second_signal, drain)
        finally:
            health.stop()
            on_stop()
            await server.stop(grace_seconds)
    return signals[0] if signals else None


async def _drain_until(signal_event: asyncio.Event, drain: Callable[[], Awaitable[None]]) -> None:
    """Await `drain`, and cancel it when the event is set. Raises the errors of `drain`."""
    drain_task = asyncio.ensure_future(drain())
    signal_task = asyncio.create_task(signal_event.wait())
    await asyncio.wait((drain_task, signal_task), return_when=asyncio.FIRST_COMPLETED)
    signal_task.cancel()
    if not drain_task.done():
        log.warning("a second signal: the server ends before its work is finished")
        drain_task.cancel()
    with suppress(asyncio.CancelledError):
        await drain_task


@contextmanager
def _reload_changed_files(
    endpoint: ServerEndpoint, check_tokens: Callable[[Tokens], None]
) -> Iterator[None]:
    watched_files = []
    tokens, tls = endpoint.tokens, endpoint.tls
    if (file := tokens.file) is not None:
        watched_files.append(WatchedFiles([file], partial(tokens.reload, check_tokens)))
    if tls is not None:
        watched_files.append(WatchedFiles(tls.paths, tls.reload))
    if not watched_files:  # SIGHUP ends the server, as if its terminal was closed
        yield
        return
    with watch_files(watched_files) as read_now:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, read_now)
        yield


def _bind_port(server: grpc.aio.Server, endpoint: ServerEndpoint) -> int:
    target = _format_target(endpoint.host, endpoint.port)
    try:
        if endpoint.tls:
            return server.add_secure_port(target, endpoint.tls.grpc_credentials())
        return server.add_insecure_port(target)
    except RuntimeError as error:
        # gRPC does not report the cause. If the host is wrong, this call raises an error about it.
        require_free_port(endpoint.host, endpoint.port)
        raise _port_taken(endpoint.port) from error


def _max_connections() -> int:
    """Return the maximum number of connections. A quarter of the file descriptors remains for
    files.

    gRPC closes further connections at once.
    """
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4


def _format_target(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _warn_if_open(endpoint: ServerEndpoint) -> None:
    if not is_loopback(endpoint.host) and not (endpoint.tokens and endpoint.tls):
        log.warning(
            "--insecure: other machines reach %s with %s and %s",
            endpoint.host,
            "tokens" if endpoint.tokens else "NO TOKEN",
            "TLS" if endpoint.tls else "NO TLS",
        )

"""How every program speaks gRPC: limits, health, drain, and the one boundary of errors."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from protos.errors import DistillError, InternalFault, InvalidInput, error_of

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 << 20
# Rows are cut into messages of at most this: one long sequence never stalls a stream's others.
MAX_CHUNK_BYTES = 1 << 20
ERROR_DOMAIN = "distill-service"
# Initial metadata of a stream that may stay quiet: its client knows that the connection stands.
STREAM_OPEN = ("stream", "open")
_STATUS_DETAILS = "grpc-status-details-bin"
# Of a message, a field, a hint: gRPC drops trailers of more than 8 KiB, and with them the fault.
_TOLD_BYTES = 1000

_LIMITS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A killed peer is seen at once, a frozen one never without pings: every 30 s, 10 s to answer.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
CHANNEL_OPTIONS = [
    *_LIMITS,
    # A restarted server is found again within a second, not after gRPC's default of two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name, how long one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Servers listen on loopback only; a proxy of the environment would get the calls instead.
    ("grpc.enable_http_proxy", 0),
]
SERVER_OPTIONS = [
    *_LIMITS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # Two servers on one port would each get half of the calls.
    ("grpc.so_reuseport", 0),
]


def require_loopback(host: str) -> None:
    """Refuse to listen where strangers could call: these servers have no accounts yet."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise InvalidInput(
            f"refusing to listen on {host}, which other machines can reach",
            field="--host",
            hint="use 127.0.0.1, and an SSH tunnel from other machines",
        )


def require_free_port(host: str, port: int) -> None:
    """Refuse a port that is taken before minutes of loading; `serve` finds it again for sure."""
    if not port:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise _port_taken(port) from error


def _port_taken(port: int) -> InvalidInput:
    return InvalidInput(
        f"port {port} is taken",
        field="--port",
        hint="choose another one, or 0 for any free port",
    )


async def serve(
    register: Callable[[grpc.aio.Server], str],
    *,
    host: str,
    port: int,
    grace_seconds: float,
    on_ready: Callable[[int], None],
    on_stop: Callable[[], None] = lambda: None,
) -> None:
    """Listen until SIGTERM or SIGINT, then let running calls end within `grace_seconds`.

    `register` adds the service and returns its full name, for health checks. `on_ready` gets the
    bound port. `on_stop` ends the streams that would not end by themselves, before the grace.
    Raises InvalidInput when the port is taken.
    """
    require_loopback(host)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)

    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[ErrorBoundary()])
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    name = register(server)
    try:
        bound = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except RuntimeError as error:
        raise _port_taken(port) from error
    await server.start()
    for service in ("", name):
        await health.set(service, health_pb2.HealthCheckResponse.SERVING)
    on_ready(bound)
    await stop.wait()
    await health.enter_graceful_shutdown()
    on_stop()
    await server.stop(grace_seconds)


class ErrorBoundary(grpc.aio.ServerInterceptor):
    """The only place where exceptions become statuses.

    A DistillError is told to the caller in full, with its field and hint as google.rpc.ErrorInfo.
    Anything else is a defect: the caller gets an id, the log gets the traceback under the same id.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        kind = f"{'stream' if handler.request_streaming else 'unary'}_"
        behavior = getattr(handler, kind + ("stream" if handler.response_streaming else "unary"))
        guard = _guard_stream if handler.response_streaming else _guard_unary
        return make(
            guard(behavior, handler_call_details.method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _guard_unary(behavior: Any, method: str) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behavior(request, context)
        except Exception as error:
            await _abort(context, error, method)

    return call


def _guard_stream(behavior: Any, method: str) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for message in behavior(request, context):
                yield message
        except Exception as error:
            await _abort(context, error, method)

    return call


def told(error: Exception, where: str) -> DistillError:
    """What a caller may know of `error`; a defect is logged under the id that the caller gets."""
    if isinstance(error, DistillError):
        return error
    error_id = secrets.token_hex(4)
    log.error("defect %s in %s", error_id, where, exc_info=error)
    return InternalFault(
        f"internal error {error_id}", hint="the server's log has the details under this id"
    )


async def _abort(
    context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str
) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    fault = told(error, method)
    status = grpc.StatusCode[fault.code.name]
    info = error_details_pb2.ErrorInfo(
        reason=type(fault).__name__,
        domain=ERROR_DOMAIN,
        metadata={"field": _cut(fault.field), "hint": _cut(fault.hint)},
    )
    packed = any_pb2.Any()
    packed.Pack(info)
    message = _cut(fault.message)
    details = status_pb2.Status(code=status.value[0], message=message, details=[packed])
    metadata = ((_STATUS_DETAILS, details.SerializeToString()),)
    await context.abort(status, message, trailing_metadata=metadata)


def _cut(text: str) -> str:
    data = text.encode(errors="replace")
    return text if len(data) <= _TOLD_BYTES else data[:_TOLD_BYTES].decode(errors="ignore") + " ..."


def fault_of(error: grpc.RpcError, server: str) -> DistillError:
    """The DistillError that a failed call stands for; `server`: its name, `teacher HOST:PORT`."""
    call: Any = error
    status: grpc.StatusCode = call.code()
    for key, value in call.trailing_metadata() or ():
        if key == _STATUS_DETAILS:
            details = status_pb2.Status.FromString(value)
            info = error_details_pb2.ErrorInfo()
            if details.details and details.details[0].Unpack(info):
                field, hint = info.metadata["field"], info.metadata["hint"]
                return error_of(status.name, details.message, field=field, hint=hint)
    if status is grpc.StatusCode.UNAVAILABLE:
        return error_of(
            status.name,
            f"cannot reach the {server}",
            hint="check that it runs and that the address is right",
        )
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return error_of(status.name, f"the {server} did not answer in time", hint="try again")
    return error_of(status.name, f"the {server} failed: {call.details()}")

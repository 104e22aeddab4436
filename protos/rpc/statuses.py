"""Conversion between errors and gRPC statuses.

Servers convert errors to statuses (`ErrorBoundary`). Clients convert statuses to errors
(`fault_of`).
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from protos.errors import (
    DistillError,
    InternalFault,
    InvalidInput,
    Overloaded,
    Unavailable,
    error_of,
)

log = logging.getLogger(__name__)

ERROR_DOMAIN = "distill-service"
_STATUS_DETAILS = "grpc-status-details-bin"
# Limit of each text (message, field, hint). gRPC drops trailers of more than 8 KiB, which would
# lose the whole error.
_TEXT_BYTES = 1000
_TLS_REASON = re.compile(r"OPENSSL_internal:(.+?)(: OK)?$")
TLS_HINT = (
    "check that the server runs with TLS, that its certificate is valid for this host and"
    " signed by $DISTILL_TLS_CA, and whether the server needs $DISTILL_TLS_CERT"
)


class ErrorBoundary(grpc.aio.ServerInterceptor):
    """The server interceptor that converts exceptions to gRPC statuses. No other code does this.

    The caller gets the message of a DistillError, and its field and hint in a google.rpc.ErrorInfo.
    Any other exception is a defect of the server: the caller gets an id, and the log gets the
    traceback with the same id.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler inside a function that converts its exceptions.

        If the method is unknown, there is no handler. Returns None then, so that gRPC refuses the
        call.
        """
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        stream_kinds = (
            "stream" if handler.request_streaming else "unary",
            "stream" if handler.response_streaming else "unary",
        )
        behavior = getattr(handler, "_".join(stream_kinds))
        # A message that cannot be decoded is the caller's error, so decode it inside the guard.
        decode = _Messages if handler.request_streaming else _decode_message
        guard = _guard_stream if handler.response_streaming else _guard_unary

        def call(request: Any, context: Any) -> Any:
            return behavior(decode(request, handler.request_deserializer), context)

        make_handler = getattr(grpc, f"{'_'.join(stream_kinds)}_rpc_method_handler")
        return make_handler(
            guard(call, handler_call_details.method),
            response_serializer=handler.response_serializer,
        )


def _guard_unary(behavior: Any, method: str) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behavior(request, context)
        except Exception as error:  # noqa: BLE001 (the call is ended with it)
            await _abort_call(context, error, method)

    return call


def _guard_stream(behavior: Any, method: str) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for message in behavior(request, context):
                yield message
        except Exception as error:  # noqa: BLE001 (the call is ended with it)
            await _abort_call(context, error, method)

    return call


def _decode_message(data: bytes, deserialize: Callable[[bytes], Any] | None) -> Any:
    try:
        return deserialize(data) if deserialize else data
    except DecodeError as error:
        raise InvalidInput(
            "the request is not a message of this method",
            hint="check that client and server have the same version",
        ) from error


class _Messages:
    """An asynchronous iterator over the messages of a request stream. It decodes each message."""

    def __init__(self, data: Any, deserialize: Callable[[bytes], Any] | None) -> None:
        self._data = data
        self._deserialize = deserialize

    def __aiter__(self) -> _Messages:
        return self

    async def __anext__(self) -> Any:
        return _decode_message(await anext(self._data), self._deserialize)


def public_error(error: Exception, method: str) -> DistillError:
    """Return the error that a caller may see in place of `error`.

    A DistillError is returned unchanged. Any other exception is logged with a new id, and an
    InternalFault with only this id is returned. `method`: name of the method, for the log.
    """
    if isinstance(error, DistillError):
        return error
    error_id = secrets.token_hex(4)
    log.error("defect %s in %s", error_id, method, exc_info=error)
    return InternalFault(f"internal error {error_id}", hint="look up this id in the server's log")


async def _abort_call(
    context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str
) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    fault = public_error(error, method)
    status = grpc.StatusCode[fault.code.name]
    info = error_details_pb2.ErrorInfo(
        reason=type(fault).__name__,
        domain=ERROR_DOMAIN,
        metadata={"field": _truncate(fault.field), "hint": _truncate(fault.hint)},
    )
    message = _truncate(fault.message)
    details = status_pb2.Status(code=status.value[0], message=message)
    details.details.add().Pack(info, deterministic=True)
    if isinstance(fault, Overloaded):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(fault.retry_after_ms)
        details.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    metadata = ((_STATUS_DETAILS, details.SerializeToString(deterministic=True)),)
    await context.abort(status, message, trailing_metadata=metadata)


def _truncate(text: str) -> str:
    data = text.encode(errors="replace")
    return text if len(data) <= _TEXT_BYTES else data[:_TEXT_BYTES].decode(errors="ignore") + " ..."


def sent_fault(error: grpc.RpcError) -> DistillError | None:
    """Return the error that a server has sent in a gRPC status; used in clients.

    Returns None if the status comes from gRPC itself or from another program.
    """
    call: Any = error
    for key, value in call.trailing_metadata() or ():
        if key == _STATUS_DETAILS:
            details, info = status_pb2.Status(), error_details_pb2.ErrorInfo()
            # Another program at this address may send other bytes under the same key.
            with suppress(DecodeError):
                details.ParseFromString(value)
                if details.details and details.details[0].Unpack(info):
                    field, hint = info.metadata["field"], info.metadata["hint"]
                    return error_of(call.code().name, details.message, field=field, hint=hint)
    return None


def fault_of(error: grpc.RpcError, server: str) -> DistillError:
    """Return the DistillError for a failed gRPC call; used in clients.

    `server`: the server's name in messages, such as `teacher HOST:PORT`. If the status does not
    come from an ErrorBoundary (no connection, a deadline, a proxy), this function writes the
    message and the hint.
    """
    if server_fault := sent_fault(error):
        return server_fault
    call: Any = error
    status: grpc.StatusCode = call.code()
    if status is grpc.StatusCode.UNAVAILABLE:
        uses_tls = "https://" in server
        reason = _TLS_REASON.search(call.details() or "") if uses_tls else None
        return error_of(
            status.name,
            f"cannot reach the {server}" + (f" ({reason[1]})" if reason else ""),
            hint=TLS_HINT
            if uses_tls
            else "check that the server runs and that the address is right",
        )
    if status is grpc.StatusCode.CANCELLED:
        # A server that shuts down cancels calls that arrive while the port is being closed, and
        # calls that did not end within the grace period.
        return Unavailable(
            f"the {server} ended the call", hint=f"check whether the {server} is shutting down"
        )
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return error_of(status.name, f"the {server} did not answer in time", hint="try again")
    if status is grpc.StatusCode.UNIMPLEMENTED:
        hint = "check that client and server have the same version"
        return error_of(status.name, f"the {server} does not have this method", hint=hint)
    return error_of(status.name, f"the {server} failed: {call.details()}")

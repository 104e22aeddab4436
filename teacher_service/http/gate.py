"""Access control of the HTTP API.

The token is in the header `Authorization: Bearer TOKEN`. The clients of TRL and ms-swift cannot
send this header, but they send the user and password of a URL, so `http://any:TOKEN@host:port` is
accepted too.
"""

from __future__ import annotations

import base64
import binascii

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from protos.auth.access import Role, Tokens
from protos.errors import DistillError, Forbidden, Unauthenticated
from protos.rpc.http_server import require_our_name
from teacher_service.http.faults import fault_answer

HEALTH = "/health"  # health probes send no token; the answer only says if the teacher serves
_BASIC = "basic "


class TokenGate:
    """ASGI middleware that checks the token of each request, if the teacher has tokens.

    Every path except HEALTH needs a token. Any role is sufficient, and a job's scoped token for
    teachers too.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens, host: str) -> None:
        """`host` is the address that the server listens on."""
        self._app = app
        self._tokens = tokens
        self._host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an allowed request to the application, or refuse it before its body is read."""
        assert scope["type"] == "http"
        try:
            self._admit(Headers(scope=scope), scope["path"])
        except DistillError as fault:
            await fault_answer(fault)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _admit(self, headers: Headers, path: str) -> None:
        if "origin" in headers:
            raise Forbidden(
                "requests from web pages are refused",
                hint="send requests without the header Origin",
            )
        require_our_name(headers.get("host", ""), self._host, f"use http://{self._host}:PORT")
        if not self._tokens or path == HEALTH:
            return
        headers_with_tokens = [(name, _convert_to_bearer(value)) for name, value in headers.items()]
        role = self._tokens.role_in(headers_with_tokens)
        if role is None and self._tokens.scope_in(headers_with_tokens) is not None:
            role = Role.READ
        if role is None:
            raise Unauthenticated(
                "the server needs a valid token, and the request has none",
                hint="send the header `Authorization: Bearer TOKEN`, or write the token into the"
                " address: http://any:TOKEN@host:port",
            )


def _convert_to_bearer(value: str) -> str:
    """Return the Bearer form of Basic credentials whose password is the token."""
    if not value.lower().startswith(_BASIC):
        return value
    try:
        decoded = base64.b64decode(value[len(_BASIC) :], validate=True).decode("ascii")
    except (binascii.Error, UnicodeDecodeError):
        return ""
    return f"Bearer {decoded.partition(':')[2]}"

"""What stands before every answer: who may ask, and what a browser may do with what it gets.

A token comes in the header `Authorization: Bearer TOKEN` and nowhere else: neither a cookie, which
a browser would send for a stranger's page, nor a URL, which ends up in logs and histories.
"""

from __future__ import annotations

from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distill_server.dashboard.responses import fault_answer
from protos.auth.access import Role, Tokens
from protos.errors import DistillError, Forbidden, Unauthenticated
from protos.rpc.transport import is_loopback

STATIC = Path(__file__).with_name("static")
# The page itself holds nothing of anybody; without it nobody could type a token.
_OPEN = frozenset({"/", *(f"/{path.name}" for path in STATIC.iterdir())})
_READING = frozenset({"GET", "HEAD"})
_HEADERS = {
    # Trusted types: even a mistake of ours cannot turn a job's name into markup.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Gate:
    """Refuses by default: reading needs the read role, everything else the submit role.

    A server without tokens may be read by everybody who reaches it, and changed by nobody: a web
    page that its owner happens to visit reaches it too.
    """

    def __init__(self, app: ASGIApp, *, tokens: Tokens, host: str) -> None:
        """`host`: what the server listens on."""
        self._app = app
        self._tokens = tokens
        self._host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                kept = "no-cache" if scope["path"] in _OPEN else "no-store"
                headers["Cache-Control"] = kept
            await send(message)

        try:
            scope["role"] = self._admit(scope)
        except DistillError as fault:
            await fault_answer(fault)(scope, receive, guarded)
            return
        await self._app(scope, receive, guarded)

    def _admit(self, scope: Scope) -> Role | None:
        """The caller's role; None for the open page. Raises Forbidden or Unauthenticated."""
        headers = Headers(scope=scope)
        self._require_our_name(headers.get("host", ""))
        reading = scope["method"] in _READING
        if reading and scope["path"] in _OPEN:
            return None
        if not self._tokens:
            if reading:
                return Role.READ
            raise Forbidden(
                "this server asks for no tokens, so its dashboard only shows",
                hint="start it with --token-file, or use the command line",
            )
        role = self._tokens.role_in(headers.items())
        if role is None:
            raise Unauthenticated("give a token that the server knows", hint="distill token")
        if not reading and role < Role.SUBMIT:
            raise Forbidden("this token may only read", hint="use one of role submit")
        return role

    def _require_our_name(self, given: str) -> None:
        """A stranger's page can name its own host and let that name lead to this machine."""
        if not is_loopback(self._host):
            return
        name = given.rpartition(":")[0] if not given.endswith("]") else given
        name = (name or given).strip("[]")
        if not is_loopback(name):
            raise Forbidden(
                f"this server is not called {name!r}", hint=f"use http://{self._host}:PORT"
            )

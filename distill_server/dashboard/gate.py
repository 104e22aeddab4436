"""Access control and security headers for every request to the dashboard.

The token is accepted only in the header `Authorization: Bearer TOKEN`: not in a cookie, which a
browser also sends for another site's page, and not in a URL, which ends up in logs and histories.
"""

from __future__ import annotations

from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distill_server.dashboard.responses import fault_answer
from protos.auth.access import OnRefusal, Role, Tokens, ignore_refusal
from protos.errors import DistillError, Forbidden, Unauthenticated
from protos.rpc.http_server import require_our_name

STATIC = Path(__file__).with_name("static")
# The files of the page need no token: they hold no data, and users enter the token in the page.
_PUBLIC_PATHS = frozenset({"/", *(f"/{path.relative_to(STATIC)}" for path in STATIC.rglob("*"))})
_READ_METHODS = frozenset({"GET", "HEAD"})
_MAX_PATH_CHARS = 100
_HEADERS = {
    # Trusted types: even a defect in the page's scripts cannot turn a job's name into markup.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class DashboardGate:
    """ASGI middleware: GET and HEAD need role read, all other methods role submit.

    Without tokens, the dashboard is read-only for everyone, because any web page that a user opens
    can send requests to the dashboard.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: Tokens,
        host: str,
        external: str = "",
        on_refusal: OnRefusal = ignore_refusal,
    ) -> None:
        """`host` is the address that the server listens on; `external` is a proxy's host name.

        `on_refusal` is called with each refused request that changes something or has a token.
        """
        self._on_refusal = on_refusal
        self._app = app
        self._tokens = tokens
        self._host = host
        self._external = external

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request, or refuse it (ASGI)."""
        assert scope["type"] == "http"

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                cache_policy = "no-cache" if scope["path"] in _PUBLIC_PATHS else "no-store"
                headers["Cache-Control"] = cache_policy
            await send(message)

        try:
            scope["role"] = self._authorize(scope)
            scope["caller"] = self._tokens.caller_in(Headers(scope=scope).items())
        except DistillError as fault:
            headers = Headers(scope=scope)
            # Before the user enters a token, the page sends requests without a token.
            if scope["method"] not in _READ_METHODS or "authorization" in headers:
                action = f"{scope['method']} {scope['path'][:_MAX_PATH_CHARS]}"
                client = scope.get("client") or ("", 0)
                peer = f"http:{client[0]}:{client[1]}"
                self._on_refusal(action, headers.items(), peer, fault)
            await fault_answer(fault)(scope, receive, send_guarded)
            return
        await self._app(scope, receive, send_guarded)

    def _authorize(self, scope: Scope) -> Role | None:
        """Return the caller's role, or None for the files that need no token.

        Raises Unauthenticated without a known token, Forbidden if the role or the host name is
        wrong.
        """
        headers = Headers(scope=scope)
        require_our_name(
            headers.get("host", ""),
            self._host,
            f"use http://{self._host}:PORT; behind a proxy, start the server with"
            " --external-url https://NAME",
            self._external,
        )
        is_reading = scope["method"] in _READ_METHODS
        if is_reading and scope["path"] in _PUBLIC_PATHS:
            return None
        if not self._tokens:
            if is_reading:
                return Role.READ
            raise Forbidden(
                "this server has no tokens, so its dashboard is read-only",
                hint="start the server with --token-file, or use the command line",
            )
        role = self._tokens.role_in(headers.items())
        if role is None:
            raise Unauthenticated(
                "the token is missing, or the server does not know it",
                hint="enter a token of the server's --token-file; distill token creates one",
            )
        if not is_reading and role < Role.SUBMIT:
            raise Forbidden("this token has role read", hint="use a token with role submit")
        return role

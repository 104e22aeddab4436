"""A client for third-party HTTP servers: API key, retries, and errors as DistillError."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterator
from typing import Any

import httpx

from protos.errors import InvalidInput, Unauthenticated, Unavailable
from protos.rpc.http_keys import key_header, retry_after
from protos.rpc.web_address import web_address

log = logging.getLogger(__name__)

KEY_VARIABLE = "DISTILL_ENDPOINT_KEY"
_FIELD = "--model"
# The server is busy, restarts or limits the rate: the same request may succeed later.
_TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONNECT_SECONDS, _ANSWER_SECONDS = 5.0, 600.0
_MAX_CONNECTIONS = 256
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 10.0
_MAX_MESSAGE_CHARS = 300


class RequestRejected(Exception):
    """The server rejects a request; a retry would not help. `status`: the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.message = message


class HttpEndpoint:
    """One HTTP server. Use it from one event loop."""

    def __init__(self, url: str, *, patience_seconds: float) -> None:
        """Prepare the connections; they open on first use.

        $DISTILL_ENDPOINT_KEY is sent as a bearer token. `patience_seconds`: how long a request is
        retried while the server does not respond or limits the rate.

        Raises InvalidInput if `url` is not an address of HTTP, or has a password, and if the key
        cannot be sent.
        """
        if not url.startswith(("http://", "https://")):
            raise InvalidInput(
                f"{url!r} is not an address",
                field=_FIELD,
                hint="with --engine endpoint, give the address of the server: http://HOST:PORT",
            )
        if web_address(url, _FIELD).userinfo:  # it would be in messages to students
            raise InvalidInput(
                "the address has a user or a password",
                field=_FIELD,
                hint=f"leave them out, and put the key into ${KEY_VARIABLE}",
            )
        self.url = url.rstrip("/").removesuffix("/v1")
        self._patience = patience_seconds
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=key_header(KEY_VARIABLE),
            timeout=httpx.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=_MAX_CONNECTIONS),
        )

    async def get(self, path: str) -> Any:
        """Return the parsed answer. Raises what `post` raises."""
        return await self._request("GET", path, None)

    async def post(self, path: str, body: object) -> Any:
        """Return the parsed answer to `body`.

        Retries while the server does not respond, is overloaded or limits the rate, and honours
        Retry-After. Raises Unavailable after `patience_seconds` of that, Unauthenticated if the key
        is refused, RequestRejected if the server refuses the request, and InvalidInput if the
        answer is not JSON.
        """
        return await self._request("POST", path, body)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _request(self, method: str, path: str, body: object) -> Any:
        start = time.monotonic()
        for pause in _generate_pauses():
            try:
                response = await self._client.request(method, path, json=body)
            except httpx.TransportError as error:
                fault = f"{type(error).__name__} {error}".strip()
            else:
                if response.status_code not in _TEMPORARY:
                    return self._parse_response(response)
                fault = f"HTTP {response.status_code}: {_read_error_message(response)}"
                pause = max(pause, retry_after(response.headers))
            waited_seconds = time.monotonic() - start
            if waited_seconds + pause > self._patience:
                raise Unavailable(
                    f"the endpoint {self.url} has not answered for {waited_seconds:.0f} s: {fault}",
                    field="teacher.address",
                    hint="check the server behind this teacher, then resume the job",
                )
            log.warning("%s; the request is repeated in %.1f s", fault, pause)
            await asyncio.sleep(pause)
        raise AssertionError("pauses do not end")

    def _parse_response(self, response: httpx.Response) -> Any:
        if response.status_code == 401:  # 403 has other reasons too: a door that is shut
            raise Unauthenticated(
                f"the endpoint {self.url} refuses the key: {_read_error_message(response)}",
                field=_FIELD,
                hint=f"put its key in ${KEY_VARIABLE}",
            )
        if response.status_code >= 300:
            raise RequestRejected(response.status_code, _read_error_message(response))
        try:
            return response.json()
        except (ValueError, RecursionError) as error:
            raise InvalidInput(
                f"the endpoint {self.url} answers {response.url.path} with something else than"
                " JSON",
                field=_FIELD,
                hint="give the address of a server with vLLM's HTTP interface",
            ) from error


def _generate_pauses() -> Iterator[float]:
    """Yield growing pauses in seconds, with jitter so that not all requests return at once."""
    pause = _FIRST_PAUSE_SECONDS
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _read_error_message(response: httpx.Response) -> str:
    """Return the server's error message, in one line."""
    try:
        content = response.json()
        content = content.get("error", content)
        text = str(content.get("message", content)) if isinstance(content, dict) else str(content)
    except (ValueError, AttributeError, RecursionError):
        text = response.text
    return " ".join(text.split())[:_MAX_MESSAGE_CHARS]

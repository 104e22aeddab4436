"""Calls an HTTP server of somebody else: key, retries, and errors in the words of this project."""

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
_MOST_CONNECTIONS = 256
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 10.0
_SHOWN = 300  # characters of a server's message


class Refused(Exception):
    """The server refuses a request, which it would refuse again. `status`: of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.message = message


class HttpEndpoint:
    """One HTTP server. Use it from one event loop."""

    def __init__(self, url: str, *, patience_seconds: float) -> None:
        """Prepare the connections; they open on first use.

        $DISTILL_ENDPOINT_KEY is sent as a bearer token. `patience_seconds`: how long a request is
        repeated while the server is away or limits the rate.

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
            limits=httpx.Limits(max_connections=_MOST_CONNECTIONS),
        )

    async def get(self, path: str) -> Any:
        """Return the parsed answer. Raises what `post` raises."""
        return await self._answer("GET", path, None)

    async def post(self, path: str, body: object) -> Any:
        """Return the parsed answer to `body`.

        Repeats the request while the server is away, is overloaded or limits the rate; it obeys
        Retry-After. Raises Unavailable after `patience_seconds` of that, Unauthenticated if the key
        is refused, Refused if the server refuses the request, and InvalidInput if the answer is not
        JSON.
        """
        return await self._answer("POST", path, body)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _answer(self, method: str, path: str, body: object) -> Any:
        began = time.monotonic()
        for pause in _pauses():
            try:
                response = await self._client.request(method, path, json=body)
            except httpx.TransportError as error:
                fault = f"{type(error).__name__} {error}".strip()
            else:
                if response.status_code not in _TEMPORARY:
                    return self._parsed(response)
                fault = f"HTTP {response.status_code}: {_message(response)}"
                pause = max(pause, retry_after(response.headers))
            waited = time.monotonic() - began
            if waited + pause > self._patience:
                raise Unavailable(
                    f"the endpoint {self.url} has not answered for {waited:.0f} s: {fault}",
                    field="teacher.address",
                    hint="check the server behind this teacher, then resume the job",
                )
            log.warning("%s; the request is repeated in %.1f s", fault, pause)
            await asyncio.sleep(pause)
        raise AssertionError("pauses do not end")

    def _parsed(self, response: httpx.Response) -> Any:
        if response.status_code == 401:  # 403 has other reasons too: a door that is shut
            raise Unauthenticated(
                f"the endpoint {self.url} refuses the key: {_message(response)}",
                field=_FIELD,
                hint=f"put its key in ${KEY_VARIABLE}",
            )
        if response.status_code >= 300:
            raise Refused(response.status_code, _message(response))
        try:
            return response.json()
        except ValueError as error:
            raise InvalidInput(
                f"the endpoint {self.url} answers {response.url.path} with something else than"
                " JSON",
                field=_FIELD,
                hint="give the address of a server with vLLM's HTTP interface",
            ) from error


def _pauses() -> Iterator[float]:
    """Yield growing pauses in seconds, with jitter so that not all requests return at once."""
    pause = _FIRST_PAUSE_SECONDS
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _message(response: httpx.Response) -> str:
    """Return what the server says of an error, in one line."""
    try:
        found = response.json()
        found = found.get("error", found)
        text = str(found.get("message", found)) if isinstance(found, dict) else str(found)
    except (ValueError, AttributeError):
        text = response.text
    return " ".join(text.split())[:_SHOWN]

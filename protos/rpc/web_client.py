"""A client of a third-party HTTP server, with a key, a proxy and retries. Needs httpx."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from urllib.request import getproxies, proxy_bypass

import httpx

from protos.errors import Corrupt, InvalidInput, TimedOut, Unavailable
from protos.rpc.transport import backoff, is_loopback

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 10.0
_LONGEST_RETRY_AFTER_SECONDS = 60.0
_CONNECT_SECONDS = 5.0
_MAX_PORT = 65535
_MAX_MESSAGE_CHARS = 300


@dataclass(frozen=True)
class WebAnswer:
    """The answer of a server, with any status code."""

    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_temporary(self) -> bool:
        """True if a retry may help: the server is busy, restarts, or limits the request rate."""
        return self.status in (408, 425, 429) or self.status >= 500

    @property
    def text(self) -> str:
        """The body as one line of at most 300 characters, for messages."""
        return " ".join(self.body.decode("utf-8", "replace").split())[:_MAX_MESSAGE_CHARS]


class WebClient:
    """A client of one server, for one event loop. It is a context manager.

    $HTTP_PROXY, $HTTPS_PROXY, $ALL_PROXY and $NO_PROXY apply. Requests to a loopback address never
    use a proxy, because the proxy would see their keys and texts.
    """

    def __init__(
        self,
        url: httpx.URL,
        *,
        attempts: int,
        answer_seconds: float,
        connections: int,
        max_bytes: int,
        key_variable: str = "",
    ) -> None:
        """Prepare the client. Its connections open on first use.

        - `url`: address of the server
        - `attempts`: maximum number of attempts of one request
        - `answer_seconds`: time limit of one attempt
        - `connections`: maximum number of connections
        - `max_bytes`: maximum size of an answer
        - `key_variable`: name of an environment variable; if it is set, its value is sent as a
          bearer token

        Raises InvalidInput if a header cannot contain the key, or if the proxy cannot be used.
        """
        self._url = url
        self._attempts = attempts
        self._answer_seconds = answer_seconds
        self._max_bytes = max_bytes
        self._slots = asyncio.Semaphore(connections)
        self._proxy = find_proxy(url)
        try:
            self._client = httpx.AsyncClient(
                headers=_build_key_header(key_variable) if key_variable else None,
                timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
                limits=httpx.Limits(max_connections=None),
                proxy=self._proxy,
                trust_env=False,  # `_tls_context` and `find_proxy` read the environment
                verify=_tls_context(),
            )
        except (ImportError, ValueError) as error:
            raise InvalidInput(
                f"the proxy of the environment cannot be used: {error}",
                hint=f"correct HTTP_PROXY, HTTPS_PROXY or ALL_PROXY, or set NO_PROXY={url.host}",
            ) from error

    async def __aenter__(self) -> WebClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def request(self, method: str, path: str = "", body: object = None) -> WebAnswer:
        """Send a request with a JSON body to `path` below the address, and return the answer.

        Redirects are not followed. If the server does not answer, or answers with a temporary
        status, the request is sent again after a growing pause, or after the time in Retry-After
        (at most 60 s). After the last attempt, returns the answer with the temporary status, or
        raises Unavailable or TimedOut. Raises Corrupt if the answer is longer than `max_bytes`.
        """
        url = str(self._url).rstrip("/") + path if path else str(self._url)
        for failures in range(1, self._attempts + 1):
            is_last = failures == self._attempts
            pause = backoff(failures, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
            try:
                answer = await self._request_once(method, url, body)
            except (Unavailable, TimedOut) as fault:
                if is_last:
                    raise
                reason = fault.message
            else:
                if is_last or not answer.is_temporary:
                    return answer
                reason = f"{url} answered {answer.status}"
                pause = max(pause, _retry_after(answer.headers))
            log.info("%s; the request is repeated in %.1f s", reason, pause)
            await asyncio.sleep(pause)
        raise AssertionError("attempts must be at least 1")

    async def _request_once(self, method: str, url: str, body: object) -> WebAnswer:
        """Send a request and read the whole answer. Raises TimedOut after the time limit.

        The limit includes the time for reading, so a server that sends its answer byte by byte also
        times out.
        """
        try:
            async with (
                self._slots,
                asyncio.timeout(self._answer_seconds),
                self._client.stream(method, url, json=body) as response,
            ):
                content = bytearray()
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > self._max_bytes:
                        limit = f"{self._max_bytes >> 20} MiB"
                        raise Corrupt(f"the answer of {url} is longer than {limit}")
                status, reason = response.status_code, response.reason_phrase
                return WebAnswer(status, reason, response.headers, bytes(content))
        except TimeoutError:
            raise TimedOut(
                f"{url}{self._describe_proxy()} timed out: there was no complete answer within"
                f" {self._answer_seconds:g} s"
            ) from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            reason = str(error) or type(error).__name__
            raise Unavailable(
                f"{url} cannot be reached{self._describe_proxy()}: {reason}"
            ) from error

    def _describe_proxy(self) -> str:
        """Return a text that names the proxy without its password; "" without a proxy."""
        if self._proxy is None:
            return ""
        proxy = httpx.URL(self._proxy)
        return f" through the proxy {proxy.scheme}://{proxy.host}:{proxy.port or ''}".rstrip(":")


def parse_web_address(text: str, field: str) -> httpx.URL:
    """Return the URL in `text`.

    Raises InvalidInput, naming `field`, if the URL has no valid host or port. Without this check,
    the first request would fail with a less clear error.
    """
    try:
        url = httpx.URL(text)
        url.host.encode("idna")  # encoded as for a DNS look-up
        if not url.host or (url.port or 0) > _MAX_PORT:
            raise ValueError(
                "the host is missing" if not url.host else f"there is no port {url.port}"
            )
    except (httpx.InvalidURL, ValueError) as error:
        raise InvalidInput(
            f"{text!r} is not a valid address: {error}",
            field=field,
            hint="give an address like http://HOST:PORT/PATH",
        ) from error
    return url


def find_proxy(url: httpx.URL) -> str | None:
    """Return the proxy for `url` from the environment.

    Returns None if no proxy is set for `url`, or if `url` has a loopback address.
    """
    if is_loopback(url.host) or proxy_bypass(url.netloc.decode()):
        return None
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy or None


def _build_key_header(variable: str) -> dict[str, str]:
    """Return the header with the key in the environment variable `variable`; {} if it is not set.

    White space around the key, such as the line break at the end of a file, is removed. Raises
    InvalidInput if a header cannot contain the key; the message does not quote the key.
    """
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise InvalidInput(
            f"${variable} has characters that are not allowed in a key", hint="copy the key again"
        )
    return {"Authorization": f"Bearer {key}"} if key else {}


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds in the header Retry-After, at most 60; 0 if it is missing or is a date."""
    try:
        seconds = float(headers.get("Retry-After", "0"))
    except ValueError:
        return 0.0
    return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER_SECONDS)


@cache
def _tls_context() -> ssl.SSLContext:
    """Return the TLS settings with the trusted certificates, including $SSL_CERT_FILE.

    The result is cached, because reading the certificates takes time.
    """
    return httpx.create_ssl_context()

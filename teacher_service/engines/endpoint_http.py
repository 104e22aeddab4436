"""A third-party HTTP server behind the endpoint engine: its API key, and its errors."""

from __future__ import annotations

from typing import Any

from clients.data.outside import parse_json
from protos.errors import InvalidInput, TimedOut, Unauthenticated, Unavailable
from protos.rpc.web_client import WebAnswer, WebClient, parse_web_address

KEY_VARIABLE = "DISTILL_ENDPOINT_KEY"
ATTEMPTS = 12  # for about a minute
_FIELD = "--model"
_ANSWER_SECONDS = 600.0
_MAX_CONNECTIONS = 256
_MAX_BYTES = 1 << 30


class RequestRejected(Exception):
    """The server rejects a request; a retry would not help. `status`: the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.message = message


class HttpEndpoint:
    """One HTTP server. Use it from one event loop."""

    def __init__(self, url: str) -> None:
        """Prepare the connections; they open on first use.

        $DISTILL_ENDPOINT_KEY is sent as a bearer token. Raises InvalidInput if `url` is not an HTTP
        address, if it contains a user or a password, or if the key cannot be sent.
        """
        if not url.startswith(("http://", "https://")):
            raise InvalidInput(
                f"{url!r} is not an address",
                field=_FIELD,
                hint="with --engine endpoint, give the address of the server: http://HOST:PORT",
            )
        if parse_web_address(url, _FIELD).userinfo:  # messages to students contain the URL
            raise InvalidInput(
                "the address has a user or a password",
                field=_FIELD,
                hint=f"remove the user and the password, and set ${KEY_VARIABLE}",
            )
        self.url = url.rstrip("/").removesuffix("/v1")
        self._client = WebClient(
            parse_web_address(self.url, _FIELD),
            attempts=ATTEMPTS,
            answer_seconds=_ANSWER_SECONDS,
            connections=_MAX_CONNECTIONS,
            max_bytes=_MAX_BYTES,
            key_variable=KEY_VARIABLE,
        )

    async def get(self, path: str) -> Any:
        """Send a GET request and return the parsed JSON answer. Raises the errors of `post`."""
        return await self._request("GET", path, None)

    async def post(self, path: str, body: object) -> Any:
        """Send `body` as JSON in a POST request, and return the parsed JSON answer.

        Raises Unavailable if the server does not answer for about a minute, Unauthenticated if the
        key is refused, RequestRejected if the server refuses the request, and InvalidInput if the
        answer is not JSON.
        """
        return await self._request("POST", path, body)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _request(self, method: str, path: str, body: object) -> Any:
        try:
            answer = await self._client.request(method, path, body)
        except (Unavailable, TimedOut) as error:
            raise self._build_error(error.message) from error
        if answer.is_temporary:
            raise self._build_error(f"HTTP {answer.status}: {_read_error_message(answer)}")
        if answer.status == 401:  # 403 is not always about the key: a path may be disabled
            raise Unauthenticated(
                f"the endpoint {self.url} refuses the key: {_read_error_message(answer)}",
                field=_FIELD,
                hint=f"set ${KEY_VARIABLE} to a valid key",
            )
        if answer.status >= 300:
            raise RequestRejected(answer.status, _read_error_message(answer))
        try:
            return parse_json(answer.body)
        except ValueError as error:
            raise InvalidInput(
                f"the endpoint {self.url} answers {path} with a body that is not JSON",
                field=_FIELD,
                hint="give the address of a server with vLLM's HTTP interface",
            ) from error

    def _build_error(self, reason: str) -> Unavailable:
        return Unavailable(
            f"the endpoint {self.url} does not answer: {reason}",
            field="teacher.address",
            hint="check the server behind this teacher, then resume the job",
        )


def _read_error_message(answer: WebAnswer) -> str:
    """Return the server's error message, in one line."""
    try:
        content = parse_json(answer.body)
        content = content.get("error", content)
        text = str(content.get("message", content)) if isinstance(content, dict) else str(content)
    except (ValueError, AttributeError):
        return answer.text
    return " ".join(text.split())[:300]

"""The client of a retrieval server with Search-R1's interface. Imports no torch.

POST URL {"queries": [...], "topk": 3, "return_scores": true}
-> {"result": [[{"document": {"contents": "title\\ntext"}, "score": 1.5}, ...], ...]}
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from clients.data.outside import parse_json, parse_text
from protos.errors import InvalidInput, Unavailable
from protos.rpc.web_address import web_address

log = logging.getLogger(__name__)

_ATTEMPTS = 4  # requests until the client gives up
_FIRST_PAUSE_SECONDS = 0.25  # doubled after each attempt, times a random number from 0.5 to 1.5
_MAX_BYTES = 64 << 20
_FIELD = "environment.retriever"
# Metadata services of AWS and Alibaba with credentials, besides the link-local 169.254.169.254.
_METADATA_ADDRESSES = ("fd00:ec2::254", "100.100.100.200")
_jitter = random.Random()  # not the global generator, which other code draws from


class _BadResponse(Exception):
    """The response of the server has no passages."""


class _NoResponse(Exception):
    """There was no complete response."""


class RemoteRetriever:
    """Sends all queries of a turn in one request; a failed request is sent up to four times."""

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        """Check the address and send a test query. `timeout_seconds`: the limit of one request.

        Raises InvalidInput if the address is not valid or is a link-local or metadata address,
        Unavailable if there is no answer like that of a retrieval server.
        """
        _refuse_metadata_address(url)
        self._url = url
        self._timeout = timeout_seconds
        self._tls = httpx.create_ssl_context()  # created once, since it reads all CA certificates
        try:
            self._request_with_retries(["test"], 1)
        except (_BadResponse, _NoResponse) as error:
            raise Unavailable(
                f"no retriever at {url}: {error}",
                field=_FIELD,
                hint="start one, or correct the address; Search-R1's ends in /retrieve",
            ) from error

    def passages(self, queries: Sequence[str], count: int) -> list[list[str] | None]:
        """Return at most `count` passages for each query; see `Retriever.passages`.

        If the server refuses the request, each query is sent separately, so that only invalid
        queries fail.
        """
        try:
            return list(self._request_with_retries(queries, count))
        except _BadResponse as error:
            log.warning(
                "a request with %d queries failed, sending each alone: %s", len(queries), error
            )
            # Other processes are waiting, so all queries share the time limit of one.
            deadline = time.monotonic() + _ATTEMPTS * self._timeout
            return [self._request_alone(query, count, deadline) for query in queries]
        except _NoResponse as error:
            log.warning("the retriever at %s failed: %s", self._url, error)
            return [None] * len(queries)

    def _request_alone(self, query: str, count: int, deadline: float) -> list[str] | None:
        if time.monotonic() > deadline:
            log.warning("skipped the query %r: the queries before it took too long", query)
            return None
        try:
            return self._request([query], count)[0]
        except (_BadResponse, _NoResponse) as error:
            log.warning("the query %r failed: %s", query, error)
            return None

    def _request_with_retries(self, queries: Sequence[str], count: int) -> list[list[str]]:
        for attempt in range(_ATTEMPTS - 1):
            try:
                return self._request(queries, count)
            except (_BadResponse, _NoResponse):
                time.sleep(_FIRST_PAUSE_SECONDS * 2**attempt * _jitter.uniform(0.5, 1.5))
        return self._request(queries, count)

    def _request(self, queries: Sequence[str], count: int) -> list[list[str]]:
        question = {"queries": list(queries), "topk": count, "return_scores": True}
        try:
            answer = parse_json(asyncio.run(self._post(question)))
        except TimeoutError:
            raise _NoResponse(f"timed out: no complete answer within {self._timeout:g} s") from None
        except httpx.HTTPError as error:
            raise _NoResponse(str(error) or type(error).__name__) from error
        except ValueError as error:
            raise _BadResponse(f"the answer is not JSON: {error}") from error
        return _parse_passages(answer, len(queries), count)

    async def _post(self, question: Mapping[str, Any]) -> bytes:
        """Send one request and read the response, all within one time limit.

        A server that sends its response byte by byte times out like one that sends nothing.
        """
        async with (
            asyncio.timeout(self._timeout),
            httpx.AsyncClient(timeout=None, verify=self._tls) as client,
            client.stream("POST", self._url, json=question) as response,
        ):
            if response.status_code != 200:
                raise _BadResponse(
                    f"the server answered {response.status_code} {response.reason_phrase}"
                )
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > _MAX_BYTES:
                    raise _BadResponse(f"the answer is longer than {_MAX_BYTES >> 20} MiB")
            return bytes(body)


def _refuse_metadata_address(url: str) -> None:
    """Raise InvalidInput for link-local and metadata addresses, where clouds keep credentials.

    The author of the job file may be another person, who must not reach this machine's network.
    """
    parsed = web_address(url, _FIELD)
    try:
        addresses = socket.getaddrinfo(parsed.host, parsed.port, type=socket.SOCK_STREAM)
    except OSError:
        return  # a proxy may resolve the name; if not, the first request fails
    for *_, address in addresses:
        ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
        if isinstance(ip, ipaddress.IPv6Address):
            ip = ip.ipv4_mapped or ip
        if ip.is_link_local or str(ip) in _METADATA_ADDRESSES:
            raise InvalidInput(
                f"{ip} is a link-local or metadata address, where clouds keep credentials",
                field=_FIELD,
                hint="serve the passages at another address",
            )


def _parse_passages(answer: Any, queries: int, count: int) -> list[list[str]]:
    """Return the texts in a server's response. Raises _BadResponse if its form is wrong."""
    try:
        passage_lists = [
            [parse_text(document["document"]["contents"]) for document in documents[:count]]
            for documents in answer["result"]
        ]
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise _BadResponse(f"the answer has no documents with contents: {error!r}") from error
    if len(passage_lists) != queries:
        raise _BadResponse(
            f"the server returned {len(passage_lists)} lists of documents for {queries} queries"
        )
    return passage_lists

"""The client of a retrieval server that has the interface of Search-R1. Does not import torch.

The request and the response have these formats:

    request    POST URL {"queries": [...], "topk": 3, "return_scores": true}
    response   {"result": [[{"document": {"contents": "title\\ntext"}, "score": 1.5}, ...], ...]}
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from clients.data.outside import parse_json, parse_text
from protos.errors import Corrupt, InvalidInput, TimedOut, Unavailable
from protos.rpc.web_client import WebAnswer, WebClient, parse_web_address

log = logging.getLogger(__name__)

_ATTEMPTS = 4  # requests until the client gives up
_MAX_BYTES = 64 << 20
_FIELD = "environment.retriever"
# Metadata services of AWS, Google and Alibaba with credentials, besides 169.254.169.254.
_METADATA_ADDRESSES = ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200")


class _BadResponse(Exception):
    """The server's response contains no passages."""


class RemoteRetriever:
    """A retriever that asks a retrieval server.

    All queries of a turn are sent in one request. A failed request is sent up to four times.
    """

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        """Check the address, and send a test query.

        `timeout_seconds`: the time limit of each attempt of a request. Raises InvalidInput if the
        address is not valid, or if it is a link-local or metadata address. Raises Unavailable if no
        retrieval server answers.
        """
        self._url = parse_web_address(url, _FIELD)
        _refuse_metadata_address(self._url)
        self._timeout = timeout_seconds
        try:
            self._request(["test"], 1)
        except (_BadResponse, Unavailable, TimedOut) as error:
            raise Unavailable(
                f"no retriever answers at {url}: {error}",
                field=_FIELD,
                hint="start a retriever, or correct the address; addresses of Search-R1 end in"
                " /retrieve",
            ) from error

    def passages(self, queries: Sequence[str], count: int) -> list[list[str] | None]:
        """Return at most `count` passages for each query; see `Retriever.passages`.

        If the server refuses a request with all queries, each query is sent in a request of its
        own. Then only the invalid queries fail.
        """
        try:
            return list(self._request(queries, count))
        except _BadResponse as error:
            log.warning(
                "a request with %d queries failed, sending each alone: %s", len(queries), error
            )
            # Other processes are waiting, so all queries share the time limit of one.
            deadline = time.monotonic() + _ATTEMPTS * self._timeout
            return [self._request_alone(query, count, deadline) for query in queries]
        except (Unavailable, TimedOut) as error:
            log.warning("the retriever at %s failed: %s", self._url, error)
            return [None] * len(queries)

    def _request_alone(self, query: str, count: int, deadline: float) -> list[str] | None:
        if time.monotonic() > deadline:
            log.warning("skipped the query %r: the queries before it took too long", query)
            return None
        try:
            return self._request([query], count, attempts=1)[0]
        except (_BadResponse, Unavailable, TimedOut) as error:
            log.warning("the query %r failed: %s", query, error)
            return None

    def _request(
        self, queries: Sequence[str], count: int, attempts: int = _ATTEMPTS
    ) -> list[list[str]]:
        question = {"queries": list(queries), "topk": count, "return_scores": True}
        try:
            answer = asyncio.run(self._post(question, attempts))
        except Corrupt as error:
            raise _BadResponse(str(error)) from error
        if answer.status != 200:
            raise _BadResponse(f"the server answered {answer.status} {answer.reason}")
        try:
            return _parse_passages(parse_json(answer.body), len(queries), count)
        except ValueError as error:
            raise _BadResponse(f"the answer is not JSON: {error}") from error

    async def _post(self, question: Mapping[str, Any], attempts: int) -> WebAnswer:
        async with WebClient(
            self._url,
            attempts=attempts,
            answer_seconds=self._timeout,
            connections=1,
            max_bytes=_MAX_BYTES,
        ) as client:
            return await client.request("POST", body=question)


def _refuse_metadata_address(url: httpx.URL) -> None:
    """Raise InvalidInput for a link-local or metadata address.

    At such addresses, clouds serve the credentials of a machine. The author of a job file must not
    be able to read them.
    """
    try:
        addresses = socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
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
    """Return the passages in a server's response, one list per query.

    Raises _BadResponse if the response has another format.
    """
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

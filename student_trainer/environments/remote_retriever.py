"""A retrieval server with Search-R1's interface. Imports no torch.

POST URL {"queries": [...], "topk": 3, "return_scores": true}
-> {"result": [[{"document": {"contents": "title\\ntext"}, "score": 1.5}, ...], ...]}
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import random
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from protos.errors import InvalidInput, Unavailable
from student_trainer.environments.web_address import web_address

log = logging.getLogger(__name__)

_ATTEMPTS = 4
_FIRST_PAUSE_SECONDS = 0.25  # doubled each time, times a random number from 0.5 to 1.5
_MOST_BYTES = 64 << 20
_FIELD = "environment.retriever"
# Where AWS and Alibaba give a machine its credentials, besides the link-local 169.254.169.254.
_OF_CLOUDS = ("fd00:ec2::254", "100.100.100.200")
_jitter = random.Random()  # of its own: the global one decides what others draw


class _Refused(Exception):
    """The server answered, and not with passages."""


class _Lost(Exception):
    """There was no whole answer."""


class RemoteRetriever:
    """Asks once for all queries of a turn; a request that fails is repeated, not for ever."""

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        """Raises InvalidInput for an address that none may have, Unavailable where nothing answers
        like a retrieval server.
        """
        _require_ordinary(url)
        self._url = url
        self._timeout = timeout_seconds
        self._tls = httpx.create_ssl_context()  # once: it reads all authorities
        try:
            self._asked(["test"], 1)
        except (_Refused, _Lost) as error:
            raise Unavailable(
                f"no retriever at {url}: {error}",
                field=_FIELD,
                hint="start it, or correct the address; Search-R1's ends in /retrieve",
            ) from error

    def passages(self, queries: Sequence[str], count: int) -> list[list[str] | None]:
        """As Retriever's. Where all queries together are refused each is asked for alone."""
        try:
            return list(self._asked(queries, count))
        except _Refused as error:
            log.warning("%d queries were refused together: %s", len(queries), error)
            # Other processes wait meanwhile: all of them have no longer than one would.
            deadline = time.monotonic() + _ATTEMPTS * self._timeout
            return [self._alone(query, count, deadline) for query in queries]
        except _Lost as error:
            log.warning("the retriever at %s failed: %s", self._url, error)
            return [None] * len(queries)

    def _alone(self, query: str, count: int, deadline: float) -> list[str] | None:
        if time.monotonic() > deadline:
            log.warning("the retriever was not asked %r: the others took too long", query)
            return None
        try:
            return self._request([query], count)[0]
        except (_Refused, _Lost) as error:
            log.warning("the retriever failed on %r: %s", query, error)
            return None

    def _asked(self, queries: Sequence[str], count: int) -> list[list[str]]:
        for attempt in range(_ATTEMPTS - 1):
            try:
                return self._request(queries, count)
            except (_Refused, _Lost):
                time.sleep(_FIRST_PAUSE_SECONDS * 2**attempt * _jitter.uniform(0.5, 1.5))
        return self._request(queries, count)

    def _request(self, queries: Sequence[str], count: int) -> list[list[str]]:
        question = {"queries": list(queries), "topk": count, "return_scores": True}
        try:
            answer = json.loads(asyncio.run(self._posted(question)))
        except TimeoutError:
            raise _Lost(f"it timed out: no whole answer in {self._timeout:g} s") from None
        except httpx.HTTPError as error:
            raise _Lost(str(error) or type(error).__name__) from error
        except (ValueError, RecursionError) as error:
            raise _Refused(f"its answer is no JSON: {error}") from error
        return _passages(answer, len(queries), count)

    async def _posted(self, question: Mapping[str, Any]) -> bytes:
        """One deadline for all of it: who drips bytes is given up like who says nothing."""
        async with (
            asyncio.timeout(self._timeout),
            httpx.AsyncClient(timeout=None, verify=self._tls) as client,
            client.stream("POST", self._url, json=question) as response,
        ):
            if response.status_code != 200:
                raise _Refused(f"it answered {response.status_code} {response.reason_phrase}")
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                if len(body) > _MOST_BYTES:
                    raise _Refused(f"its answer is longer than {_MOST_BYTES >> 20} MiB")
            return bytes(body)


def _require_ordinary(url: str) -> None:
    """A job may come from somebody else, and this machine's network is not theirs to ask."""
    parsed = web_address(url, _FIELD)
    try:
        found = socket.getaddrinfo(parsed.host, parsed.port, type=socket.SOCK_STREAM)
    except OSError:
        return  # a proxy may know it; otherwise asking it says so
    for *_, address in found:
        ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
        if isinstance(ip, ipaddress.IPv6Address):
            ip = ip.ipv4_mapped or ip
        if ip.is_link_local or str(ip) in _OF_CLOUDS:
            raise InvalidInput(
                f"{ip} is an address of the machine's own network, where clouds keep credentials",
                field=_FIELD,
                hint="serve passages at another one",
            )


def _passages(answer: Any, queries: int, count: int) -> list[list[str]]:
    """The texts in what the server said; raises _Refused where it has another shape."""
    try:
        found = [[item["document"]["contents"] for item in one[:count]] for one in answer["result"]]
    except (TypeError, KeyError, IndexError) as error:
        raise _Refused(f"its answer has no documents with contents: {error!r}") from error
    if len(found) != queries or not all(isinstance(text, str) for one in found for text in one):
        raise _Refused(f"it gave {len(found)} lists of documents for {queries} queries")
    return found

"""A retrieval server with Search-R1's interface. Imports no torch.

POST URL {"queries": [...], "topk": 3, "return_scores": true}
-> {"result": [[{"document": {"contents": "title\\ntext"}, "score": 1.5}, ...], ...]}
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from protos.errors import Unavailable

log = logging.getLogger(__name__)

_ATTEMPTS = 4
_FIRST_PAUSE_SECONDS = 0.25  # doubled each time, times a random number from 0.5 to 1.5
_MOST_BYTES = 64 << 20
_jitter = random.Random()  # of its own: the global one decides what others draw


class _Refused(Exception):
    """The server answered, and not with passages."""


class RemoteRetriever:
    """Asks once for all queries of a turn; a request that fails is repeated, not for ever."""

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        """Raises Unavailable where nothing answers like a retrieval server."""
        self._url = url
        self._timeout = timeout_seconds
        try:
            self._asked(["test"], 1)
        except (_Refused, OSError, HTTPException) as error:
            raise Unavailable(
                f"no retriever at {url}: {error}",
                field="environment.retriever",
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
        except (OSError, HTTPException) as error:
            log.warning("the retriever at %s failed: %s", self._url, error)
            return [None] * len(queries)

    def _alone(self, query: str, count: int, deadline: float) -> list[str] | None:
        if time.monotonic() > deadline:
            log.warning("the retriever was not asked %r: the others took too long", query)
            return None
        try:
            return self._request([query], count)[0]
        except (_Refused, OSError, HTTPException) as error:
            log.warning("the retriever failed on %r: %s", query, error)
            return None

    def _asked(self, queries: Sequence[str], count: int) -> list[list[str]]:
        for attempt in range(_ATTEMPTS - 1):
            try:
                return self._request(queries, count)
            except (_Refused, OSError, HTTPException):
                time.sleep(_FIRST_PAUSE_SECONDS * 2**attempt * _jitter.uniform(0.5, 1.5))
        return self._request(queries, count)

    def _request(self, queries: Sequence[str], count: int) -> list[list[str]]:
        question = {"queries": list(queries), "topk": count, "return_scores": True}
        request = Request(
            self._url, json.dumps(question).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urlopen(request, timeout=self._timeout) as response:
                answer = json.loads(response.read(_MOST_BYTES))
        except HTTPError as error:
            with error:
                raise _Refused(f"it answered {error.code} {error.reason}") from error
        except ValueError as error:
            raise _Refused(f"its answer is no JSON: {error}") from error
        return _passages(answer, len(queries), count)


def _passages(answer: Any, queries: int, count: int) -> list[list[str]]:
    """The texts in what the server said; raises _Refused where it has another shape."""
    try:
        found = [[item["document"]["contents"] for item in one[:count]] for one in answer["result"]]
    except (TypeError, KeyError, IndexError) as error:
        raise _Refused(f"its answer has no documents with contents: {error!r}") from error
    if len(found) != queries or not all(isinstance(text, str) for one in found for text in one):
        raise _Refused(f"it gave {len(found)} lists of documents for {queries} queries")
    return found

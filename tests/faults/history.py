"""The requests and answers of a client; `check` requires each position once and in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from clients.teacher.pending_requests import RequestStream
from clients.teacher.query import ScoreQuery, request_of
from protos import teacher_pb2

RequestKey = tuple[bytes, int, bytes]


@dataclass(frozen=True)
class SentRequest:
    """One request on the wire and its answers, each with its arrival time."""

    key: RequestKey
    next_position: int
    chunks: list[tuple[float, teacher_pb2.ScoreChunk]] = field(default_factory=list)

    def positions(self) -> list[tuple[int, int]]:
        """Return the half-open spans of the received rows."""
        rows = (chunk for _, chunk in self.chunks if not chunk.HasField("error"))
        return [(c.first_position, c.first_position + c.count) for c in rows]


class History:
    """A record of the messages that clients send and receive, without payloads."""

    def __init__(self) -> None:
        self._requests: dict[str, SentRequest] = {}
        self._lock = threading.Lock()

    def record_request(self, request: teacher_pb2.ScoreRequest) -> None:
        with self._lock:
            self._requests[request.request_id] = SentRequest(
                request_key(request), request.next_position
            )

    def record_chunk(self, chunk: teacher_pb2.ScoreChunk) -> None:
        bare_chunk = teacher_pb2.ScoreChunk()
        bare_chunk.CopyFrom(chunk)
        bare_chunk.payload = b""
        with self._lock:
            self._requests[chunk.request_id].chunks.append((time.monotonic(), bare_chunk))

    def forget(self) -> None:
        """Clear the record."""
        with self._lock:
            self._requests.clear()

    def wait_for_row(self, after: float) -> float:
        """Return the arrival time of the first row after `after`; both are monotonic times."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with self._lock:
                arrival_times = [
                    arrival_time
                    for request in self._requests.values()
                    for arrival_time, _ in request.chunks
                    if arrival_time > after
                ]
            if arrival_times:
                return min(arrival_times)
            time.sleep(0.005)
        raise AssertionError("no row came for a minute")

    def messages(self) -> int:
        return sum(len(request.chunks) for request in self._requests.values())

    def count_resumed(self) -> int:
        """Return the number of requests for the remaining rows of a sequence."""
        return sum(request.next_position > 0 for request in self._requests.values())

    def amplification(self, queries: Sequence[ScoreQuery]) -> float:
        """Return the number of rows requested on the wire, divided by the rows of the queries."""
        lengths = {request_key(request_of(query, "")): len(query.token_ids) for query in queries}
        wanted_rows = sum(query.rows for query in queries)
        on_wire = sum(
            lengths[request.key] - (request.next_position or request.key[1])
            for request in self._requests.values()
        )
        return on_wire / wanted_rows

    def check(self, queries: Sequence[ScoreQuery]) -> int:
        """Assert that every position of every query arrived once and in order; return the number of
        positions. The queries must differ.
        """
        by_query: dict[RequestKey, list[SentRequest]] = {}
        for request in self._requests.values():  # in sending order
            by_query.setdefault(request.key, []).append(request)
        total = 0
        for query in queries:
            attempts = by_query.pop(request_key(request_of(query, "")))
            position = query.start
            digest = None
            for attempt in attempts:
                assert attempt.next_position in (0, position), "asked from where it stopped"
                if attempt.next_position == 0:
                    position = query.start
                for _, chunk in attempt.chunks:
                    assert not chunk.HasField("error"), chunk.error
                    assert digest in (None, chunk.scoring_digest), "two scorings in one sequence"
                    digest = chunk.scoring_digest
                    assert chunk.first_position == position, "a gap, or a row twice"
                    position += chunk.count
                    assert chunk.last == (position == len(query.token_ids))
            assert position == len(query.token_ids), "rows are missing"
            total += query.rows
        assert not by_query, "what nobody asked for"
        return total


def request_key(request: teacher_pb2.ScoreRequest) -> RequestKey:
    return request.token_ids, request.start, request.head_ids


def record(monkeypatch: pytest.MonkeyPatch) -> History:
    """Record the messages of every client of this process from now on."""
    history = History()
    next_request, receive = RequestStream._next_request, RequestStream.receive

    def recorded_request(stream: RequestStream) -> Iterator[teacher_pb2.ScoreRequest] | None:
        messages = next_request(stream)
        if messages is None:
            return None
        (request,) = messages  # a query of these tests fits into one message
        history.record_request(request)
        return iter([request])

    def recorded_chunk(stream: RequestStream, chunk: teacher_pb2.ScoreChunk) -> None:
        if chunk.request_id in stream.in_flight:  # the client ignores other chunks
            history.record_chunk(chunk)
        receive(stream, chunk)

    monkeypatch.setattr(RequestStream, "_next_request", recorded_request)
    monkeypatch.setattr(RequestStream, "receive", recorded_chunk)
    return history

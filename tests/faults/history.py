"""What crossed the wire of a client, and the rule that it keeps: each position once, in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from clients.teacher.pending_requests import RequestStream
from clients.teacher.query import ScoreQuery, request_of
from protos import teacher_pb2

Asked = tuple[bytes, int, bytes]


@dataclass(frozen=True)
class Sent:
    """One request on the wire, and the answers to it, each with the time it came."""

    asked: Asked
    next_position: int
    chunks: list[tuple[float, teacher_pb2.ScoreChunk]] = field(default_factory=list)

    def positions(self) -> list[tuple[int, int]]:
        """Half-open spans of the rows that came."""
        rows = (chunk for _, chunk in self.chunks if not chunk.HasField("error"))
        return [(c.first_position, c.first_position + c.count) for c in rows]


class History:
    """Recorded where messages enter and leave a client; payloads are left out."""

    def __init__(self) -> None:
        self._sent: dict[str, Sent] = {}
        self._lock = threading.Lock()

    def requested(self, request: teacher_pb2.ScoreRequest) -> None:
        with self._lock:
            self._sent[request.request_id] = Sent(asked_by(request), request.next_position)

    def received(self, chunk: teacher_pb2.ScoreChunk) -> None:
        kept = teacher_pb2.ScoreChunk()
        kept.CopyFrom(chunk)
        kept.payload = b""
        with self._lock:
            self._sent[chunk.request_id].chunks.append((time.monotonic(), kept))

    def forget(self) -> None:
        """Begin anew."""
        with self._lock:
            self._sent.clear()

    def wait_for_row(self, after: float) -> float:
        """When the first row came after a moment of the monotonic clock."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with self._lock:
                came = [at for sent in self._sent.values() for at, _ in sent.chunks if at > after]
            if came:
                return min(came)
            time.sleep(0.005)
        raise AssertionError("no row came for a minute")

    def messages(self) -> int:
        return sum(len(sent.chunks) for sent in self._sent.values())

    def resumed(self) -> int:
        """Requests that asked for the rest of a sequence."""
        return sum(sent.next_position > 0 for sent in self._sent.values())

    def amplification(self, asked: Sequence[ScoreQuery]) -> float:
        """Rows that were asked for on the wire, over the rows that were wanted."""
        lengths = {asked_by(request_of(query, "")): len(query.token_ids) for query in asked}
        wanted = sum(query.rows for query in asked)
        on_wire = sum(
            lengths[sent.asked] - (sent.next_position or sent.asked[1])
            for sent in self._sent.values()
        )
        return on_wire / wanted

    def check(self, asked: Sequence[ScoreQuery]) -> int:
        """Every position of every query once and in order, whatever broke in between; returns how
        many. The queries must differ.
        """
        by_query: dict[Asked, list[Sent]] = {}
        for sent in self._sent.values():  # in the order of sending
            by_query.setdefault(sent.asked, []).append(sent)
        total = 0
        for query in asked:
            attempts = by_query.pop(asked_by(request_of(query, "")))
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


def asked_by(request: teacher_pb2.ScoreRequest) -> Asked:
    return request.token_ids, request.start, request.head_ids


def record(monkeypatch: pytest.MonkeyPatch) -> History:
    """Of every client of this process, from now on."""
    history = History()
    next_request, receive = RequestStream._next_request, RequestStream.receive

    def recorded_request(stream: RequestStream) -> Iterator[teacher_pb2.ScoreRequest] | None:
        messages = next_request(stream)
        if messages is None:
            return None
        (request,) = messages  # a query of these tests fits into one message
        history.requested(request)
        return iter([request])

    def recorded_chunk(stream: RequestStream, chunk: teacher_pb2.ScoreChunk) -> None:
        if chunk.request_id in stream.in_flight:  # the client ignores the rest, so does its history
            history.received(chunk)
        receive(stream, chunk)

    monkeypatch.setattr(RequestStream, "_next_request", recorded_request)
    monkeypatch.setattr(RequestStream, "receive", recorded_chunk)
    return history

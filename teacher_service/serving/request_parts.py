"""Joins the messages of requests whose chosen ids or images do not fit into one message."""

from __future__ import annotations

from typing import Literal

from protos import teacher_pb2
from protos.errors import InvalidInput
from protos.rpc.transport import MAX_REQUEST_BYTES
from teacher_service.serving.answer_budget import BudgetShare

# The fields of a request that may be in several messages.
_FIELDS: tuple[Literal["head_ids"], Literal["draw_ids"], Literal["images"]]
_FIELDS = ("head_ids", "draw_ids", "images")

Request = tuple[teacher_pb2.ScoreRequest, InvalidInput | None]


class RequestParts:
    """The messages of one unfinished request of a stream; their bytes count in `share`.

    A message with `more` is followed by further ids or images of its request, see
    protos/teacher.proto.
    """

    def __init__(self, share: BudgetShare) -> None:
        self._share = share
        self._first: teacher_pb2.ScoreRequest | None = None
        self._ids: dict[str, list[bytes]] = {name: [] for name in _FIELDS}
        self._bytes = 0

    def add(self, message: teacher_pb2.ScoreRequest) -> list[Request]:
        """Return the requests that `message` completes, each with its error or None."""
        requests: list[Request] = []
        if self._first is not None and message.request_id != self._first.request_id:
            requests += self.take_unfinished()
        if self._first is None:
            if not message.more:
                return [*requests, (message, None)]
            self._first = message
        for name in _FIELDS:
            self._store_part(name, getattr(message, name))
        if not message.more:
            requests.append(self._join_parts())
        return requests

    def take_unfinished(self) -> list[Request]:
        """Return the unfinished request with an error, if there is one."""
        if self._first is None:
            return []
        request, _ = self._join_parts()
        return [(request, _size_error("the messages with the rest of it are missing"))]

    def _store_part(self, name: str, ids: bytes) -> None:
        self._bytes += len(ids)
        if ids and self._bytes <= MAX_REQUEST_BYTES:
            self._ids[name].append(ids)
            self._share.take(len(ids))

    def _join_parts(self) -> Request:
        assert self._first is not None
        request, size, parts_by_name = self._first, self._bytes, self._ids
        request.more = False
        for name, ids in parts_by_name.items():
            self._share.give_back(sum(map(len, ids)))
            if ids:
                setattr(request, name, b"".join(ids))
        self._first, self._ids, self._bytes = None, {name: [] for name in _FIELDS}, 0
        if size <= MAX_REQUEST_BYTES:
            return request, None
        for name in _FIELDS:
            request.ClearField(name)
        return request, _size_error(f"{size} bytes, but a request holds {MAX_REQUEST_BYTES}")


def _size_error(message: str) -> InvalidInput:
    return InvalidInput(
        message, field="head_ids", hint="use fewer head ids per position, or smaller images"
    )

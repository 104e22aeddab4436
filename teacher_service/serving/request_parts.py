"""Joins the messages of requests whose head ids do not fit into one message."""

from __future__ import annotations

from protos import teacher_pb2
from protos.errors import InvalidInput
from protos.rpc.transport import MAX_REQUEST_BYTES
from teacher_service.serving.answer_budget import BudgetShare

Request = tuple[teacher_pb2.ScoreRequest, InvalidInput | None]


class RequestParts:
    """The messages of one unfinished request of a stream; their bytes count in `share`.

    A message with `more` is followed by further head ids of its request, see protos/teacher.proto.
    """

    def __init__(self, share: BudgetShare) -> None:
        self._share = share
        self._first: teacher_pb2.ScoreRequest | None = None
        self._ids: list[bytes] = []
        self._bytes = 0

    def add(self, message: teacher_pb2.ScoreRequest) -> list[Request]:
        """Return the requests that `message` completes, each with its error or None."""
        found: list[Request] = []
        if self._first is not None and message.request_id != self._first.request_id:
            found += self.rest()
        if self._first is None:
            if not message.more:
                return [*found, (message, None)]
            self._first = message
        self._keep(message.head_ids)
        if not message.more:
            found.append(self._joined())
        return found

    def rest(self) -> list[Request]:
        """Return the unfinished request with an error, if there is one."""
        if self._first is None:
            return []
        request, _ = self._joined()
        return [(request, _refused("the messages with its other head ids are missing"))]

    def _keep(self, ids: bytes) -> None:
        self._bytes += len(ids)
        if self._bytes <= MAX_REQUEST_BYTES:
            self._ids.append(ids)
            self._share.take(len(ids))

    def _joined(self) -> Request:
        assert self._first is not None
        request, size = self._first, self._bytes
        request.head_ids, request.more = b"".join(self._ids), False
        self._share.give_back(sum(map(len, self._ids)))
        self._first, self._ids, self._bytes = None, [], 0
        if size <= MAX_REQUEST_BYTES:
            return request, None
        request.ClearField("head_ids")
        return request, _refused(f"{size} bytes, but a request holds {MAX_REQUEST_BYTES}")


def _refused(message: str) -> InvalidInput:
    return InvalidInput(message, field="head_ids", hint="use fewer head ids per position")

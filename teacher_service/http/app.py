"""The HTTP application. A page (a route) reads a request, scores its sequences and answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from clients.teacher.query import ScoreQuery
from protos.errors import DistillError, InvalidInput, Unavailable
from protos.rpc.metrics_page import CONTENT_TYPE
from teacher_service.http.chosen_ids import read_chosen_ids
from teacher_service.http.clients import HttpClient, HttpClients
from teacher_service.http.completions import read_completions
from teacher_service.http.faults import fault_answer, on_error, on_http_error
from teacher_service.http.gate import HEALTH
from teacher_service.http.scoring_request import ScoringRequest, refuse
from teacher_service.metrics import TeacherMetrics
from teacher_service.serving.answer_budget import MAX_ANSWER_BYTES
from teacher_service.serving.dispatcher import Dispatcher, build_stopping_error
from teacher_service.serving.fair_queue import Sender
from teacher_service.serving.scorer import RowAnswer, RowScorer
from teacher_service.serving.validation import RequestLimits

# The limit of a request body: about a million tokens.
MAX_BODY_BYTES = 8 << 20
_THREAD_BYTES = 64 << 10  # a longer body is parsed in a thread
_PIECE_BYTES = 64 << 10
# Memory of an answer's rows, encoded and decoded.
_HEAD_ID_BYTES, _ROW_BYTES = 18, 24
_JSON_HEADERS = [(b"content-type", b"application/json")]


@dataclass
class HttpTeacher:
    """The parts of the teacher that the pages (routes) use, and the handlers of the GET pages.

    `created` is the start of the teacher in Unix seconds.
    """

    scorer: RowScorer
    dispatcher: Dispatcher
    limits: RequestLimits
    metrics: TeacherMetrics
    clients: HttpClients
    created: int = field(default_factory=lambda: int(time.time()))

    async def models(self, request: Request) -> Response:
        """GET /v1/models: the names of the model and its adapters, and the maximum tokens."""
        info = self.dispatcher.info
        names = {info.model: None, **dict.fromkeys(info.adapters, info.model)}
        data = [
            {
                "id": name,
                "object": "model",
                "created": self.created,
                "owned_by": "distill-teacher",
                "parent": parent,
                "max_model_len": self.limits.max_length,
            }
            for name, parent in names.items()
        ]
        return JSONResponse({"object": "list", "data": data})

    async def health(self, request: Request) -> Response:
        """GET /health: an empty answer, with status 503 if the engine is broken."""
        return Response(status_code=503 if self.dispatcher.broken else 200)

    async def exposition(self, request: Request) -> Response:
        """GET /metrics: the metrics in the text format of Prometheus."""
        text = generate_latest(self.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE)

    def completions(self, body: bytes) -> ScoringRequest:
        """Parse the body of POST /v1/completions, with the limits of this teacher."""
        return read_completions(body, self.limits, self.dispatcher.info)

    def chosen_ids(self, body: bytes) -> ScoringRequest:
        """Parse the body of POST /inference/v1/generate, with the limits of this teacher."""
        return read_chosen_ids(body, self.limits, self.dispatcher.info)


@dataclass(frozen=True)
class ScoringPage:
    """A page that answers a request with the rows of its sequences (an ASGI application).

    `read` parses the body of a request.
    """

    teacher: HttpTeacher
    read: Callable[[bytes], ScoringRequest]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. If the client disconnects, its queries are removed from the queue."""
        headers = Headers(scope=scope)
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            fault = InvalidInput("must be application/json", field="Content-Type", hint="send JSON")
            await fault_answer(fault, 415)(scope, receive, send)
            return
        size = _read_content_length(headers)
        if size > MAX_BODY_BYTES:
            await _build_too_large_answer(size)(scope, receive, send)
            return
        if self.teacher.dispatcher.broken:
            raise build_stopping_error()
        with self.teacher.clients.enter(scope, size) as client:
            body = await _receive_body(receive)
            if body is None:
                return
            answering = asyncio.create_task(self._answer(body, client, send))
            disconnection = asyncio.create_task(_wait_for_disconnect(receive))
            try:
                await asyncio.wait((answering, disconnection), return_when=asyncio.FIRST_COMPLETED)
                if answering.done():
                    answering.result()
            finally:
                for task in (answering, disconnection):
                    task.cancel()
                await asyncio.gather(answering, disconnection, return_exceptions=True)

    async def _answer(self, body: bytes, client: HttpClient, send: Send) -> None:
        request = await self._read_request(body)
        async with client.reserve_memory(_estimate_bytes(request.queries)):
            answers = await self._score_all(request.queries, client.sender)
            info = self.teacher.dispatcher.info
            if any(answer.version != info.version for answer in answers):
                raise Unavailable(
                    "the weights of this teacher have changed", hint="send the request again"
                )
            pieces = request.text([answer.rows.block for answer in answers], info)
            await send({"type": "http.response.start", "status": 200, "headers": _JSON_HEADERS})
            has_more = True
            while has_more:
                text, has_more = await asyncio.to_thread(_next_piece, pieces)
                await send({"type": "http.response.body", "body": text, "more_body": has_more})

    async def _read_request(self, body: bytes) -> ScoringRequest:
        try:
            if len(body) > _THREAD_BYTES:
                return await asyncio.to_thread(self.read, body)
            return self.read(body)
        except DistillError as fault:
            self.teacher.metrics.count_refusal(fault)
            raise

    async def _score_all(self, queries: Sequence[ScoreQuery], sender: Sender) -> list[RowAnswer]:
        """Return the rows of all queries; the first error cancels the other queries."""
        tasks = [asyncio.create_task(self._score(query, sender)) for query in queries]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _score(self, query: ScoreQuery, sender: Sender) -> RowAnswer:
        with self.teacher.metrics.measure_request() as measured:
            answer = await self.teacher.scorer.score(query, sender)
            measured.record_answer(query.rows)
            return answer


def make_app(teacher: HttpTeacher) -> ASGIApp:
    """Build the application, without its access control."""
    routes = [
        Route("/v1/models", teacher.models),
        Route(HEALTH, teacher.health),
        Route("/metrics", teacher.exposition),
        Route("/v1/completions", ScoringPage(teacher, teacher.completions), methods=["POST"]),
        Route("/inference/v1/generate", ScoringPage(teacher, teacher.chosen_ids), methods=["POST"]),
    ]
    faults: Mapping[Any, Any] = {
        DistillError: on_error,
        HTTPException: on_http_error,
        Exception: on_error,
    }
    return Starlette(routes=routes, exception_handlers=faults)


def _read_content_length(headers: Headers) -> int:
    length = headers.get("content-length")
    if length is None:
        refuse("Content-Length", "the header is missing", "send the body in one piece")
    if "transfer-encoding" in headers:  # this header would override the length
        refuse("Transfer-Encoding", "the body comes in chunks", "send the body in one piece")
    return int(length)


def _build_too_large_answer(size: int) -> Response:
    fault = InvalidInput(
        f"the request has {size} bytes, but the limit is {MAX_BODY_BYTES}",
        field="body",
        hint="send fewer sequences in a request",
    )
    return fault_answer(fault, 413)


async def _receive_body(receive: Receive) -> bytes | None:
    """Return the body of a request, or None if the client disconnects before its end."""
    parts = []
    while (message := await receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)
    return None


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _estimate_bytes(queries: Sequence[ScoreQuery]) -> int:
    """Return the estimated size of the rows in bytes. Raises InvalidInput above the limit."""
    id_count = sum(query.rows * (query.k + query.tail_draws) for query in queries)
    size = _HEAD_ID_BYTES * id_count + _ROW_BYTES * sum(query.rows for query in queries)
    if size > MAX_ANSWER_BYTES // 2:
        raise InvalidInput(
            f"the rows of this request take {size >> 20} MiB, but the limit is"
            f" {MAX_ANSWER_BYTES >> 21} MiB",
            field="body",
            hint="send fewer sequences in a request",
        )
    return size


def _next_piece(pieces: Iterator[bytes]) -> tuple[bytes, bool]:
    """Return the next piece of the answer, and False if it is the last piece.

    The parts of `pieces` are joined to at least _PIECE_BYTES, except in the last piece.
    """
    parts, size = [], 0
    for part in pieces:
        parts.append(part)
        size += len(part)
        if size >= _PIECE_BYTES:
            return b"".join(parts), True
    return b"".join(parts), False

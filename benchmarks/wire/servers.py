"""The servers that `benchmarks.wire` measures, each in its own process, with prepared rows.

    python -m benchmarks.wire.servers grpc K           the teacher service itself
    python -m benchmarks.wire.servers http K FORMAT    GET /TOKENS, on FastAPI and uvicorn

Each server prints its port.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Sequence
from functools import cache

import grpc.aio
import uvicorn
from fastapi import FastAPI, Response

from benchmarks.shared.model_rows import VOCAB, model_rows
from benchmarks.wire.formats import FORMATS
from clients.teacher.query import ScoreQuery
from protos import teacher_pb2_grpc
from protos.rows.codec import RowBlock
from protos.rpc.server import ServerEndpoint, serve
from teacher_service.engines.fake import FakeEngine, FakeSettings
from teacher_service.metrics import TeacherMetrics
from teacher_service.serving.batcher import Batcher
from teacher_service.serving.scorer import RowScorer
from teacher_service.serving.service import TeacherServicer
from teacher_service.serving.validation import RequestLimits
from teacher_service.serving.weights import WeightUpdater

MAX_LENGTH = 8192


def head_of(block: RowBlock, k: int) -> RowBlock:
    """Return the rows with only the k likeliest candidates and the tail of the full head."""
    ids, logprobs = block.head_ids, block.head_logprobs
    assert ids is not None
    return RowBlock(
        ids[:, :k].copy(), logprobs[:, :k].copy(), block.tail_logmass, block.token_logprobs
    )


class RecordedEngine(FakeEngine):
    """An engine that returns prepared rows at once, so that only the service is measured."""

    def __init__(self, rows: RowBlock) -> None:
        super().__init__(FakeSettings(vocab=VOCAB, max_length=MAX_LENGTH))
        self._rows = rows

    def score(self, queries: Sequence[ScoreQuery]) -> list[RowBlock]:
        return [self._rows.slice(0, query.rows) for query in queries]


async def serve_grpc(k: int) -> None:
    engine = RecordedEngine(head_of(model_rows(), k))
    metrics = TeacherMetrics()
    async with Batcher(engine, max_batch_tokens=1 << 16, metrics=metrics) as batcher:
        limits = RequestLimits(VOCAB, MAX_LENGTH, 1024)
        weights = WeightUpdater(engine, batcher)
        servicer = TeacherServicer(RowScorer(batcher, None), batcher, weights, limits, metrics)

        def register(server: grpc.aio.Server) -> str:
            teacher_pb2_grpc.add_TeacherServicer_to_server(servicer, server)
            return "distill.v1.Teacher"

        await serve(
            register,
            ServerEndpoint(),
            grace_seconds=1.0,
            on_ready=lambda port: print(port, flush=True),
        )


async def serve_http(k: int, name: str) -> None:
    wire = FORMATS[name]
    rows = head_of(model_rows(), k)
    app = FastAPI()

    @cache
    def prepared_rows(tokens: int) -> object:
        return wire.hold(rows.slice(0, tokens))

    @app.get("/{tokens}")
    async def answer(tokens: int) -> Response:
        return Response(wire.encode(prepared_rows(tokens)), media_type="application/json")

    # asyncio sets TCP_NODELAY only if the socket names its protocol. Without it, a response
    # can wait for an acknowledgement.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    await server.serve(sockets=[listener])


if __name__ == "__main__":
    kind, k, *names = sys.argv[1:]
    asyncio.run(serve_grpc(int(k)) if kind == "grpc" else serve_http(int(k), *names))

"""The servicer: decode, one domain call, encode."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from clients.score_query import IDENTITY_KEY, identity_of
from protos import teacher_pb2, teacher_pb2_grpc
from protos.errors import WrongState
from teacher_service.engines.base import EngineInfo
from teacher_service.score_stream import ScoreStream
from teacher_service.scorer import Scorer, chunks_of
from teacher_service.validation import Limits, query_of

_TOKENS_PER_CHUNK = 2048


class TeacherServicer(teacher_pb2_grpc.TeacherServicer):
    """Service distill.v1.Teacher."""

    def __init__(self, scorer: Scorer, info: EngineInfo, limits: Limits) -> None:
        self._scorer = scorer
        self._info = info
        self._limits = limits
        self._streams: set[ScoreStream] = set()

    async def GetInfo(
        self, request: teacher_pb2.GetInfoRequest, context: object
    ) -> teacher_pb2.TeacherInfo:
        return teacher_pb2.TeacherInfo(
            model=self._info.model,
            fingerprint=self._info.fingerprint,
            version=self._scorer.version,
            tokenizer_fingerprint=self._info.tokenizer_fingerprint,
            vocab_size=self._limits.vocab_size,
            max_top_k=self._limits.max_top_k,
            max_length=self._limits.max_length,
            dtype=self._info.dtype,
            engine=self._info.name,
            batch_invariant=self._info.batch_invariant,
        )

    async def GetVocabulary(
        self, request: teacher_pb2.GetVocabularyRequest, context: object
    ) -> AsyncIterator[teacher_pb2.VocabularyChunk]:
        tokens = self._info.vocabulary
        for first in range(0, len(tokens), _TOKENS_PER_CHUNK):
            yield teacher_pb2.VocabularyChunk(
                first_id=first, tokens=tokens[first : first + _TOKENS_PER_CHUNK]
            )

    async def Score(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[teacher_pb2.ScoreChunk]:
        self._require_same_teacher(context.invocation_metadata())
        stream = ScoreStream(request_iterator, self._answer)
        self._streams.add(stream)
        context.add_done_callback(lambda _: stream.cancel())
        try:
            async for chunk in stream.chunks():
                yield chunk
        finally:
            self._streams.discard(stream)

    def drain(self) -> None:
        """End every stream after the requests that were read."""
        for stream in self._streams:
            stream.drain()

    def _require_same_teacher(self, metadata: Any) -> None:
        """Who reconnects may meet another teacher on the old port: their rows must never mix."""
        expected = dict(metadata or ()).get(IDENTITY_KEY)
        if expected is None:
            return
        actual = identity_of(self._info.fingerprint, self._scorer.version)
        if expected != actual:
            raise WrongState(
                f"this teacher is {actual}, the requests are for {expected}",
                field="teacher.address",
                hint="start the teacher with the weights the job began with, or start a new job",
            )

    async def _answer(
        self, request: teacher_pb2.ScoreRequest
    ) -> AsyncIterator[teacher_pb2.ScoreChunk]:
        query = query_of(request, self._limits)
        scored = await self._scorer.score(query)
        for chunk in chunks_of(scored, query, request.request_id, request.next_position):
            yield chunk

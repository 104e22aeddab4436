"""The servicer: decode, one domain call, encode."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from clients.teacher.query import IDENTITY_KEY, MAX_TAIL_SAMPLES, identity_of
from protos import teacher_pb2, teacher_pb2_grpc
from protos.errors import Unavailable, WrongState
from protos.rpc.failpoints import failpoint
from teacher_service.metrics_page import TeacherMetrics
from teacher_service.serving.batcher import Batcher
from teacher_service.serving.score_stream import ScoreStream
from teacher_service.serving.scorer import Scorer, chunks_of
from teacher_service.serving.validation import Limits, parse_request
from teacher_service.serving.weights import Weights

_TOKENS_PER_CHUNK = 2048


class TeacherServicer(teacher_pb2_grpc.TeacherServicer):
    """Service distill.v1.Teacher."""

    def __init__(
        self,
        scorer: Scorer,
        batcher: Batcher,
        weights: Weights,
        limits: Limits,
        metrics: TeacherMetrics,
    ) -> None:
        self._scorer = scorer
        self._batcher = batcher
        self._weights = weights
        self._limits = limits
        self._metrics = metrics
        self._streams: set[ScoreStream] = set()
        metrics.gauge("active_streams", "Score streams.", lambda: len(self._streams))
        metrics.gauge("queued_tokens", "Waiting for the model.", lambda: batcher.queued_tokens)
        metrics.gauge("weights_version", "Updates of the weights.", lambda: batcher.info.version)
        metrics.cache(scorer.tiers)

    async def GetInfo(
        self, request: teacher_pb2.GetInfoRequest, context: object
    ) -> teacher_pb2.TeacherInfo:
        info = self._batcher.info
        return teacher_pb2.TeacherInfo(
            model=info.model,
            fingerprint=info.fingerprint,
            version=info.version,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            vocab_size=self._limits.vocab_size,
            max_top_k=self._limits.max_top_k,
            max_length=self._limits.max_length,
            dtype=info.dtype,
            engine=info.name,
            batch_invariant=info.batch_invariant,
            load=self._load(),
            max_tail_samples=MAX_TAIL_SAMPLES,
        )

    async def GetVocabulary(
        self, request: teacher_pb2.GetVocabularyRequest, context: object
    ) -> AsyncIterator[teacher_pb2.VocabularyChunk]:
        tokens = self._batcher.info.vocabulary
        for first in range(0, len(tokens), _TOKENS_PER_CHUNK):
            yield teacher_pb2.VocabularyChunk(
                first_id=first, tokens=tokens[first : first + _TOKENS_PER_CHUNK]
            )

    async def Score(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[teacher_pb2.ScoreChunk]:
        version = self._version_asked_for(context.invocation_metadata())
        stream = ScoreStream(request_iterator, self._answer)
        self._streams.add(stream)
        context.add_done_callback(lambda _: stream.cancel())
        try:
            async for chunk in stream.chunks():
                if version not in (None, chunk.version) and not chunk.HasField("error"):
                    # Who pushed them opens a stream for them; anybody else must not go on.
                    raise Unavailable("the weights of this teacher have changed")
                yield chunk
                failpoint("chunk-sent")
        finally:
            self._streams.discard(stream)

    async def PushWeights(
        self, request_iterator: Any, context: object
    ) -> teacher_pb2.PushWeightsReply:
        info = await self._weights.push(aiter(request_iterator))
        return teacher_pb2.PushWeightsReply(version=info.version, fingerprint=info.fingerprint)

    def drain(self) -> None:
        """End every stream after the requests that were read."""
        for stream in self._streams:
            stream.drain()

    def _version_asked_for(self, metadata: Any) -> int | None:
        """Who reconnects may meet another teacher on the old port: their rows must never mix."""
        expected = dict(metadata or ()).get(IDENTITY_KEY)
        if expected is None:
            return None
        info = self._batcher.info
        actual = identity_of(info.fingerprint, info.version)
        if expected != actual:
            raise WrongState(
                f"this teacher is {actual}, the requests are for {expected}",
                field="teacher.address",
                hint="start the teacher with the weights the job began with, or start a new job",
            )
        return info.version

    async def _answer(
        self, request: teacher_pb2.ScoreRequest
    ) -> AsyncIterator[teacher_pb2.ScoreChunk]:
        with self._metrics.request() as measured:
            query = parse_request(request, self._limits)
            answer = await self._scorer.score(query)
            measured.answered(query.rows)
            for chunk in chunks_of(answer, query, request.request_id, request.next_position):
                yield chunk

    def _load(self) -> teacher_pb2.TeacherLoad:
        metrics = self._metrics
        return teacher_pb2.TeacherLoad(
            queued_tokens=self._batcher.queued_tokens,
            active_streams=len(self._streams),
            scored_tokens=metrics.total("scored_tokens_total"),
            forwards=metrics.total("forward_seconds_count"),
            cancelled=metrics.total("requests_total", code="CANCELLED"),
            cache_tiers=[
                teacher_pb2.CacheTierLoad(name=name, hits=hits, misses=misses)
                for name, (hits, misses) in self._scorer.tiers().items()
            ],
        )

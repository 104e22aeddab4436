"""The gRPC servicer of the teacher. It decodes requests, calls the service, encodes replies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

from clients.teacher.query import (
    IDENTITY_KEY,
    LAST_TURN,
    MAX_TAIL_DRAWS,
    MAX_TAIL_SAMPLES,
    TURN_KEY,
    identity_of,
)
from protos import teacher_pb2, teacher_pb2_grpc
from protos.errors import Unavailable, WrongState
from protos.rpc.failpoints import failpoint
from protos.rpc.transport import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES
from teacher_service.metrics import TeacherMetrics
from teacher_service.serving.answer_budget import AnswerBudget
from teacher_service.serving.dispatcher import Dispatcher, build_stopping_error
from teacher_service.serving.fair_queue import Sender
from teacher_service.serving.score_stream import ScoreStream
from teacher_service.serving.scorer import RowScorer, split_into_chunks
from teacher_service.serving.validation import RequestLimits, parse_request
from teacher_service.serving.weights import WeightUpdater

_TOKENS_PER_CHUNK = 2048


class TeacherServicer(teacher_pb2_grpc.TeacherServicer):
    """The gRPC service distill.v1.Teacher. The server's error interceptor handles all errors."""

    def __init__(
        self,
        scorer: RowScorer,
        dispatcher: Dispatcher,
        weights: WeightUpdater,
        limits: RequestLimits,
        metrics: TeacherMetrics,
        budget: AnswerBudget | None = None,
    ) -> None:
        """`budget` bounds the answers of all streams; None creates a budget."""
        self._scorer = scorer
        self._dispatcher = dispatcher
        self._weights = weights
        self._limits = limits
        self._metrics = metrics
        self._budget = budget or AnswerBudget()
        self._streams: set[ScoreStream] = set()
        queued_help, version_help = (
            "Tokens waiting for the model.",
            "Weight updates since the start.",
        )
        metrics.add_gauge("active_streams", "Open Score streams.", lambda: len(self._streams))
        metrics.add_gauge("queued_tokens", queued_help, lambda: dispatcher.queued_tokens)
        metrics.add_gauge("weights_version", version_help, lambda: dispatcher.info.version)
        metrics.add_cache_counters(scorer.tiers)

    async def GetInfo(
        self, request: teacher_pb2.GetInfoRequest, context: object
    ) -> teacher_pb2.TeacherInfo:
        """Return identity, limits and load of the teacher."""
        info = self._dispatcher.info
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
            load=self._build_load(),
            max_tail_samples=MAX_TAIL_SAMPLES if info.limits.tail_samples else 0,
            max_tail_draws=MAX_TAIL_DRAWS,
            max_request_bytes=MAX_REQUEST_BYTES,
            max_chosen_ids=info.limits.max_chosen_ids,
            only_temperature_one=not info.limits.any_temperature,
            takes_vocab_size=info.limits.any_vocab_size,
            adapters=[
                teacher_pb2.TeacherAdapter(name=name, fingerprint=fingerprint)
                for name, fingerprint in info.adapters.items()
            ],
            takes_images=info.placeholder is not None,
            chat_template=info.chat_template,
        )

    async def GetVocabulary(
        self, request: teacher_pb2.GetVocabularyRequest, context: object
    ) -> AsyncIterator[teacher_pb2.VocabularyChunk]:
        """Stream the tokens in order of id."""
        tokens = self._dispatcher.info.vocabulary
        for first in range(0, len(tokens), _TOKENS_PER_CHUNK):
            yield teacher_pb2.VocabularyChunk(
                first_id=first, tokens=tokens[first : first + _TOKENS_PER_CHUNK]
            )

    async def Score(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[teacher_pb2.ScoreChunk]:
        """Stream the rows for each request of the stream; an error of a request is sent as a chunk.

        If the client names a teacher in the metadata, raises WrongState if this is another teacher
        or version, and Unavailable if a weight update is applied during the call or the engine is
        broken.
        """
        if self._dispatcher.broken:
            raise build_stopping_error()
        metadata = dict(context.invocation_metadata() or ())
        version = self._read_expected_version(metadata)
        sender = Sender(is_background=metadata.get(TURN_KEY) == LAST_TURN)
        answer = partial(self._answer, sender=sender)
        stream = ScoreStream(request_iterator, answer, self._limits, self._budget)
        self._streams.add(stream)
        context.add_done_callback(lambda _: stream.cancel())
        try:
            async for chunk in stream.chunks():
                if version not in (None, chunk.version) and not chunk.HasField("error"):
                    # The client that pushed the weights opens a new stream for them. The new
                    # stream of any other client fails, because it names the old version.
                    raise Unavailable("the weights of this teacher have changed")
                yield chunk
                failpoint("chunk-sent")
        finally:
            self._streams.discard(stream)

    async def PushWeights(
        self, request_iterator: Any, context: object
    ) -> teacher_pb2.PushWeightsReply:
        """Apply a weight update between two batches; a push that fails changes nothing."""
        info = await self._weights.push(aiter(request_iterator))
        return teacher_pb2.PushWeightsReply(version=info.version, fingerprint=info.fingerprint)

    def drain(self) -> None:
        """Stop reading requests; each stream ends once the requests it has read are answered.

        If the engine is broken, each stream ends at once with Unavailable.
        """
        for stream in self._streams:
            if self._dispatcher.broken:
                # Clients send the requests of a broken connection to another teacher.
                stream.fail(build_stopping_error())
            else:
                stream.drain()

    def _read_expected_version(self, metadata: Mapping[str, Any]) -> int | None:
        """Return the version that the client expects, or None if the client names no teacher.

        A client that reconnects may reach another teacher on the same port. Rows of two teachers
        must never mix, so this raises WrongState if the client expects another teacher.
        """
        expected = metadata.get(IDENTITY_KEY)
        if expected is None:
            return None
        info = self._dispatcher.info
        own_identity, *adapter_identities = (
            identity_of(fingerprint, info.version)
            for fingerprint in (info.fingerprint, *info.adapters.values())
        )
        if expected not in (own_identity, *adapter_identities):
            raise WrongState(
                f"this teacher has fingerprint {own_identity}, but the requests are for {expected}",
                field="teacher.address",
                hint="start the teacher with the weights that the job began with, or start a new"
                " job",
            )
        return info.version

    async def _answer(
        self, request: teacher_pb2.ScoreRequest, sender: Sender | None = None
    ) -> AsyncIterator[teacher_pb2.ScoreChunk]:
        with self._metrics.measure_request() as measured:
            if request.image_sizes or len(request.head_ids) > MAX_MESSAGE_BYTES:
                # Parsing takes 0.1 s and more. Meanwhile, the event loop serves other requests.
                query = await asyncio.to_thread(parse_request, request, self._limits)
            else:
                query = parse_request(request, self._limits)
            answer = await self._scorer.score(query, sender)
            measured.record_answer(query.rows)
            for chunk in split_into_chunks(
                answer, query, request.request_id, request.next_position
            ):
                yield chunk

    def _build_load(self) -> teacher_pb2.TeacherLoad:
        metrics = self._metrics
        return teacher_pb2.TeacherLoad(
            queued_tokens=self._dispatcher.queued_tokens,
            active_streams=len(self._streams),
            scored_tokens=metrics.read_total("scored_tokens_total"),
            forwards=metrics.read_total("forward_seconds_count"),
            cancelled=metrics.read_total("requests_total", code="CANCELLED"),
            cache_tiers=[
                teacher_pb2.CacheTierLoad(name=name, hits=hits, misses=misses)
                for name, (hits, misses) in self._scorer.tiers().items()
            ],
        )

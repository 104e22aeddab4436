"""Builds the teacher service from its settings (engine, cache, batcher), and serves it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass

import grpc.aio

from protos import teacher_pb2_grpc
from protos.errors import InvalidInput
from protos.rpc.logs import fields
from protos.rpc.metrics_page import metrics_page
from protos.rpc.server import ServerEndpoint, serve
from teacher_service.cache.row_cache import RowCache
from teacher_service.cache.settings import CacheSettings, make_cache, open_redis
from teacher_service.engines.base import AsksServer, ContinuousEngine, Engine
from teacher_service.http.app import Teacher
from teacher_service.http.callers import Callers
from teacher_service.http.front import HttpFront
from teacher_service.metrics import TeacherMetrics
from teacher_service.serving.answer_budget import AnswerBudget
from teacher_service.serving.batcher import Batcher
from teacher_service.serving.dispatcher import Dispatcher
from teacher_service.serving.feeder import Feeder
from teacher_service.serving.scorer import RowScorer
from teacher_service.serving.self_test import run_self_test
from teacher_service.serving.service import TeacherServicer
from teacher_service.serving.validation import RequestLimits
from teacher_service.serving.weights import Weights

log = logging.getLogger(__name__)

GRACE_SECONDS = 30.0


@dataclass(frozen=True)
class VllmSettings:
    """Options of the vllm engine: the number of GPUs, and the share of their memory in (0, 1]."""

    tensor_parallel_size: int
    gpu_memory_share: float


@dataclass(frozen=True)
class EndpointSettings:
    """Options of the endpoint engine: directory of the tokenizer, and the model's name there."""

    tokenizer: str = ""
    served_model: str = ""

    def given(self) -> dict[str, str]:
        """Return the values by their option; "" if an option is not given."""
        return {"--tokenizer": self.tokenizer, "--served-model": self.served_model}


@dataclass(frozen=True)
class EngineSettings:
    """The engine and its model; the command-line options of the same names explain each field."""

    name: str
    model: str
    dtype: str
    device: str
    batch_invariant: bool
    max_batch_tokens: int
    max_top_k: int
    vllm: VllmSettings
    endpoint: EndpointSettings = EndpointSettings()


@dataclass(frozen=True)
class TeacherSettings:
    """The settings of `distill-teacher`.

    With `cache` None, no rows are kept. `metrics` is the (host, port) of the metrics page, or None
    for no page. `http` None: the teacher answers gRPC only.
    """

    engine: EngineSettings
    endpoint: ServerEndpoint
    cache: CacheSettings | None
    metrics: tuple[str, int] | None
    http: HttpFront | None = None


def run(settings: TeacherSettings) -> None:
    """Load the engine and serve until SIGTERM or SIGINT.

    Raises SystemExit with code 1 if the engine fails every query; see Dispatcher. Raises
    InvalidInput if the settings cannot work, and WrongState if the self-test of the engine fails.
    """
    redis = open_redis(settings.cache) if settings.cache else None
    metrics = TeacherMetrics()
    with metrics_page(metrics.registry, settings.metrics):
        # Check before loading, which takes minutes, and after the page has bound its port.
        settings.endpoint.require_usable()
        if settings.http:
            settings.http.require_usable(settings.endpoint)
        engine = make_engine(settings.engine)
        difference = run_self_test(engine)
        meaning = "Largest difference of two scorings of a token at startup."
        metrics.gauge("self_test_nats", meaning, lambda: difference)
        if isinstance(engine, AsksServer):
            asked = engine
            meaning = "Tokens of all requests to the endpoint, which may charge for them."
            metrics.gauge("endpoint_tokens", meaning, lambda: asked.tokens_asked)
        cache = None
        if settings.cache:
            cache = make_cache(settings.cache, redis, engine.info.fingerprint)
        asyncio.run(_serve(settings, engine, cache, metrics))
    if cache:
        log.info("cache", extra=fields(**cache.counters()))


def make_engine(settings: EngineSettings) -> Engine:
    """Load the engine `settings.name`.

    Raises InvalidInput if the engine is unknown, lacks one of the options that are set, or cannot
    load the model.
    """
    if settings.name != "endpoint":
        for option, value in settings.endpoint.given().items():
            if value:
                raise _unknown_to(settings.name, option, "use --engine endpoint")
    match settings.name:
        case "hf":
            if settings.vllm.tensor_parallel_size != 1:
                raise _unknown_to("hf", "--tensor-parallel-size", "use --engine vllm")
            from teacher_service.engines.hf import HfEngine

            return HfEngine(
                settings.model,
                dtype=settings.dtype,
                device=settings.device,
                batch_invariant=settings.batch_invariant,
            )
        case "vllm":
            if settings.device != "auto":
                raise _unknown_to("vllm", "--device", "set CUDA_VISIBLE_DEVICES")
            if settings.batch_invariant:
                raise _unknown_to("vllm", "--batch-invariant", "use --engine hf")
            from teacher_service.engines.vllm import VllmEngine

            return VllmEngine(
                settings.model,
                dtype=settings.dtype,
                tensor_parallel_size=settings.vllm.tensor_parallel_size,
                gpu_memory_share=settings.vllm.gpu_memory_share,
                max_batch_tokens=settings.max_batch_tokens,
            )
        case "endpoint":
            from teacher_service.engines.endpoint import EndpointEngine

            if not settings.endpoint.tokenizer:
                raise InvalidInput(
                    "the endpoint engine needs the tokenizer of the server's model",
                    field="--tokenizer",
                    hint="give its directory or hub id",
                )
            return EndpointEngine(
                settings.model,
                tokenizer=settings.endpoint.tokenizer,
                served_model=settings.endpoint.served_model,
                max_top_k=settings.max_top_k,
                step_tokens=settings.max_batch_tokens,
            )
        case "fake":
            from teacher_service.engines.fake import FakeEngine, parse_settings

            return FakeEngine(parse_settings(settings.model))
        case name:
            raise InvalidInput(
                f"unknown engine {name!r}", field="--engine", hint="use hf, vllm, endpoint or fake"
            )


def _unknown_to(engine: str, option: str, hint: str) -> InvalidInput:
    return InvalidInput(f"the {engine} engine has no such option", field=option, hint=hint)


async def _serve(
    settings: TeacherSettings, engine: Engine, cache: RowCache | None, metrics: TeacherMetrics
) -> None:
    info = engine.info
    most = info.limits.max_top_k or info.vocab_size
    limits = RequestLimits(info.vocab_size, info.max_length, min(settings.engine.max_top_k, most))
    stop = asyncio.Event()
    dispatching: Dispatcher
    if isinstance(engine, ContinuousEngine):
        dispatching = Feeder(engine, on_broken=stop.set, metrics=metrics)
    else:
        dispatching = Batcher(
            engine,
            max_batch_tokens=settings.engine.max_batch_tokens,
            on_broken=stop.set,
            metrics=metrics,
        )
    async with cache or nullcontext(), dispatching as dispatcher:
        scorer, budget = RowScorer(dispatcher, cache), AnswerBudget()
        weights = Weights(engine, dispatcher)
        servicer = TeacherServicer(scorer, dispatcher, weights, limits, metrics, budget)
        teacher = Teacher(scorer, dispatcher, limits, metrics, Callers(budget))
        async with _http(settings, teacher) as (url, stop_http):

            def register(server: grpc.aio.Server) -> str:
                teacher_pb2_grpc.add_TeacherServicer_to_server(servicer, server)
                return "distill.v1.Teacher"

            def on_ready(port: int) -> None:
                facts = {"engine": info.name, "model": info.model, "dtype": info.dtype}
                log.info("serving", extra=fields(**facts, fingerprint=info.fingerprint[:16]))
                print(f"teacher listening on {settings.endpoint.address(port)}", flush=True)
                if url:
                    print(f"HTTP on {url}", flush=True)

            def on_stop() -> None:
                stop_http()
                servicer.drain()

            await serve(
                register,
                settings.endpoint,
                grace_seconds=GRACE_SECONDS,
                on_ready=on_ready,
                on_stop=on_stop,
                stop=stop,
            )
        if dispatcher.broken:
            raise SystemExit(1)


@asynccontextmanager
async def _http(
    settings: TeacherSettings, teacher: Teacher
) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """Serve HTTP within the block, if settings.http. Yields the URL or "", and how to end it."""
    if settings.http is None:
        yield "", lambda: None
    else:
        async with settings.http.serving(teacher, settings.endpoint) as found:
            yield found

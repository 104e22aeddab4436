"""Builds the teacher service from its settings (engine, cache, batcher), and serves it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc.aio

from protos import teacher_pb2_grpc
from protos.errors import ExitCode, InvalidInput
from protos.program.logs import fields
from protos.rpc.metrics_page import MetricsPage, metrics_page
from protos.rpc.server import ServerEndpoint, serve
from teacher_service.cache.settings import CacheSettings, make_cache, open_redis
from teacher_service.engines.base import ContinuousEngine, RemoteEngine, ScoringEngine
from teacher_service.http.app import HttpTeacher
from teacher_service.http.clients import HttpClients
from teacher_service.http.front import HttpFront, LoadingApp
from teacher_service.metrics import TeacherMetrics
from teacher_service.models.adapters import read_adapters
from teacher_service.models.device_map import DEVICE_MAP, OPTION, free_memory
from teacher_service.models.load_progress import LoadProgress
from teacher_service.serving.answer_budget import AnswerBudget
from teacher_service.serving.batcher import Batcher
from teacher_service.serving.dispatcher import Dispatcher
from teacher_service.serving.feeder import Feeder
from teacher_service.serving.loading import LoadingServicer, log_progress, run_in_thread
from teacher_service.serving.scorer import RowScorer
from teacher_service.serving.self_test import run_self_test
from teacher_service.serving.service import TeacherServicer
from teacher_service.serving.validation import RequestLimits
from teacher_service.serving.weights import WeightUpdater

log = logging.getLogger(__name__)

GRACE_SECONDS = 30.0


@dataclass(frozen=True)
class VllmEngineSettings:
    """Options of the vllm engine: the number of GPUs, and the share of their memory in (0, 1].

    `options` are further options of vLLM, each NAME=VALUE.
    """

    tensor_parallel_size: int
    gpu_memory_share: float
    options: Sequence[str] = ()


@dataclass(frozen=True)
class EndpointSettings:
    """Options of the endpoint engine.

    - tokenizer: directory or hub id of the tokenizer.
    - served_model: the model's name at the endpoint.
    """

    tokenizer: str = ""
    served_model: str = ""

    def values_by_option(self) -> dict[str, str]:
        """Return the values by command-line option, such as --tokenizer; "" if it is not given."""
        return {"--tokenizer": self.tokenizer, "--served-model": self.served_model}


@dataclass(frozen=True)
class ScoringEngineSettings:
    """The engine and its model; the command-line options of the same names explain each field.

    Each of `adapters` is NAME=DIR. `device_map` is "auto", or "" for a model on one device.
    """

    name: str
    model: str
    dtype: str
    device: str
    batch_invariant: bool
    max_batch_tokens: int
    max_top_k: int
    vllm: VllmEngineSettings
    endpoint: EndpointSettings = EndpointSettings()
    adapters: Sequence[str] = ()
    device_map: str = ""


@dataclass(frozen=True)
class TeacherSettings:
    """The settings of `distill-teacher`.

    - cache: None means that no rows are kept.
    - metrics: (host, port) of the metrics page.
    - http: None means that the teacher answers only gRPC calls.
    """

    engine: ScoringEngineSettings
    endpoint: ServerEndpoint
    cache: CacheSettings | None
    metrics: tuple[str, int]
    http: HttpFront | None = None


def run(settings: TeacherSettings) -> None:
    """Load the engine and serve until SIGTERM or SIGINT.

    Binds the port before loading the engine, so that calls during loading get the progress. A
    signal during loading ends this process at once, with exit code 0, or 130 for SIGINT. Raises
    SystemExit with code 1 if the engine fails every query; see Dispatcher. Raises InvalidInput if
    the settings are invalid, and WrongState if the self-test of the engine fails.
    """
    redis = open_redis(settings.cache) if settings.cache else None
    metrics = TeacherMetrics()
    page = MetricsPage(metrics.registry)
    metrics.add_gauge("ready", "1 if the teacher is ready, 0 while it loads.", lambda: page.ready)
    with metrics_page(page, settings.metrics):
        # Check before loading, which takes minutes, and after the page has bound its port.
        settings.endpoint.require_usable()
        if settings.http:
            settings.http.require_usable(settings.endpoint)
        asyncio.run(_Program(settings, redis, metrics, page).serve())


def make_engine(
    settings: ScoringEngineSettings, progress: LoadProgress | None = None
) -> ScoringEngine:
    """Load the engine `settings.name`, and report the stages of the load to `progress`.

    Raises InvalidInput if the engine is unknown, does not have one of the given options, or cannot
    load the model.
    """
    _require_known_options(settings)
    adapters = read_adapters(settings.adapters)
    match settings.name:
        case "hf":
            from teacher_service.engines.hf import HfEngine

            return HfEngine(
                settings.model,
                dtype=settings.dtype,
                device=settings.device,
                batch_invariant=settings.batch_invariant,
                adapters=adapters,
                memory=free_memory(settings.vllm.gpu_memory_share) if settings.device_map else None,
                progress=progress,
            )
        case "vllm":
            from teacher_service.engines.vllm import VllmEngine

            return VllmEngine(
                settings.model,
                dtype=settings.dtype,
                tensor_parallel_size=settings.vllm.tensor_parallel_size,
                gpu_memory_share=settings.vllm.gpu_memory_share,
                max_batch_tokens=settings.max_batch_tokens,
                adapters=adapters,
                options=settings.vllm.options,
                progress=progress,
            )
        case "endpoint":
            from teacher_service.engines.endpoint import EndpointEngine

            if not settings.endpoint.tokenizer:
                raise InvalidInput(
                    "the endpoint engine needs the tokenizer of the server's model",
                    field="--tokenizer",
                    hint="give the directory or hub id of the tokenizer",
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


def _require_known_options(settings: ScoringEngineSettings) -> None:
    """Raise InvalidInput if an option is set that belongs to another engine."""
    is_vllm = settings.name == "vllm"
    endpoint_values = settings.endpoint.values_by_option() if settings.name != "endpoint" else {}
    unsupported = [
        (option, "use --engine endpoint") for option, value in endpoint_values.items() if value
    ]
    if settings.name == "hf" and settings.vllm.tensor_parallel_size != 1:
        unsupported.append(("--tensor-parallel-size", "use --engine vllm"))
    if settings.vllm.options and not is_vllm:
        unsupported.append(("--engine-option", "use --engine vllm"))
    if is_vllm and settings.device != "auto":
        unsupported.append(("--device", "set CUDA_VISIBLE_DEVICES"))
    if is_vllm and settings.batch_invariant:
        unsupported.append(("--batch-invariant", "use --engine hf"))
    if settings.adapters and settings.name == "endpoint":
        unsupported.append(("--adapter", "name the adapter as --served-model"))
    elif settings.adapters and not (is_vllm or settings.name == "hf"):
        unsupported.append(("--adapter", "use --engine hf or vllm"))
    if settings.device_map and settings.name != "hf":
        unsupported.append((OPTION, "use --engine hf, or with vllm --tensor-parallel-size"))
    elif settings.device_map:
        _require_divisible(settings)
    for option, hint in unsupported:
        raise InvalidInput(
            f"the {settings.name} engine has no such option", field=option, hint=hint
        )


def _require_divisible(settings: ScoringEngineSettings) -> None:
    """Raise InvalidInput for a setting that cannot be used together with --device-map."""
    problem = ""
    if settings.device_map != DEVICE_MAP:
        problem, hint = f"unknown device map {settings.device_map!r}", f"use {DEVICE_MAP}"
    elif settings.device != "auto":
        problem, hint = (
            "--device-map uses all devices",
            "remove --device, or set CUDA_VISIBLE_DEVICES",
        )
    elif settings.adapters:
        problem, hint = (
            "a model that is divided has no adapters",
            "merge the adapter into the model",
        )
    if problem:
        raise InvalidInput(problem, field=OPTION, hint=hint)


class _Program:
    """The running teacher: its port, its engine while and after loading, and its servers.

    `redis` is the connection of the cache, if the settings have one.
    """

    def __init__(
        self, settings: TeacherSettings, redis: Any, metrics: TeacherMetrics, page: MetricsPage
    ) -> None:
        self._settings = settings
        self._redis = redis
        self._metrics = metrics
        self._page = page
        self._progress = LoadProgress()
        self._servicer = LoadingServicer(self._progress)
        self._stop = asyncio.Event()
        self._dispatcher: Dispatcher | None = None
        self._stop_callbacks: list[Callable[[], None]] = []
        self._http_url = ""

    async def serve(self) -> None:
        """Bind the port, load, and serve until a signal or until the engine is broken.

        Raises SystemExit with code 1 if the engine is broken.
        """

        def register(server: grpc.aio.Server) -> str:
            teacher_pb2_grpc.add_TeacherServicer_to_server(self._servicer, server)
            return "distill.v1.Teacher"

        self._page.follow(asyncio.get_running_loop())
        async with AsyncExitStack() as stack:
            stop_signal = await serve(
                register,
                self._settings.endpoint,
                grace_seconds=GRACE_SECONDS,
                prepare=partial(self._load, stack),
                on_ready=self._announce_ready,
                on_stop=self._stop_requests,
                stop=self._stop,
            )
        if self._dispatcher is None:
            # The loading thread may hold a device, and only the end of the process stops it.
            logging.shutdown()
            os._exit(ExitCode.INTERRUPTED if stop_signal is signal.SIGINT else ExitCode.OK)
        if self._dispatcher.broken:
            raise SystemExit(1)

    async def _load(self, stack: AsyncExitStack) -> None:
        """Start the HTTP API, load the engine, open cache and dispatcher, and begin to answer.

        Everything that is opened is closed when `stack` is closed.
        """
        settings, metrics = self._settings, self._metrics
        app, front = LoadingApp(self._progress), AsyncExitStack()
        await stack.enter_async_context(front)
        self._http_url, stop_http = await front.enter_async_context(_serve_http(settings, app))
        progress_logger = asyncio.create_task(log_progress(self._progress))
        try:
            engine = await run_in_thread(self._load_engine, self._stop)
        finally:
            progress_logger.cancel()
        if engine is None:
            return
        info = engine.info
        cache = None
        if settings.cache:
            cache = make_cache(settings.cache, self._redis, info.fingerprint)
            stack.callback(lambda: log.info("cache", extra=fields(**cache.counters())))
            await stack.enter_async_context(cache)
        dispatcher = await stack.enter_async_context(self._make_dispatcher(engine))
        max_top_k = info.limits.max_top_k or info.vocab_size
        limits = RequestLimits(
            info.vocab_size,
            info.max_length,
            min(settings.engine.max_top_k, max_top_k),
            frozenset(info.adapters),
            info.placeholder,
        )
        scorer, budget = RowScorer(dispatcher, cache), AnswerBudget()
        weights = WeightUpdater(engine, dispatcher)
        servicer = TeacherServicer(scorer, dispatcher, weights, limits, metrics, budget)
        # HTTP requests end before the services that answer them.
        await stack.enter_async_context(front.pop_all())
        self._stop_callbacks = [stop_http, servicer.drain]
        self._dispatcher = dispatcher
        self._servicer.set_teacher(servicer)
        app.set_teacher(HttpTeacher(scorer, dispatcher, limits, metrics, HttpClients(budget)))

    def _load_engine(self) -> ScoringEngine:
        engine = make_engine(self._settings.engine, self._progress)
        self._progress.begin("scoring its self-test")
        difference = run_self_test(engine)
        meaning = "Largest difference of two scorings of a token at startup."
        self._metrics.add_gauge("self_test_nats", meaning, lambda: difference)
        if isinstance(engine, RemoteEngine):
            remote_engine = engine
            meaning = "Tokens of all requests to the endpoint, which may charge for them."
            self._metrics.add_gauge(
                "endpoint_tokens", meaning, lambda: remote_engine.requested_tokens
            )
        return engine

    def _make_dispatcher(self, engine: ScoringEngine) -> Dispatcher:
        if isinstance(engine, ContinuousEngine):
            return Feeder(engine, on_broken=self._stop.set, metrics=self._metrics)
        return Batcher(
            engine,
            max_batch_tokens=self._settings.engine.max_batch_tokens,
            on_broken=self._stop.set,
            metrics=self._metrics,
        )

    def _stop_requests(self) -> None:
        self._page.stop()
        for stop in self._stop_callbacks:
            stop()

    def _announce_ready(self, port: int) -> None:
        assert self._dispatcher
        self._page.start()
        info = self._dispatcher.info
        facts = {"engine": info.name, "model": info.model, "dtype": info.dtype}
        log.info("serving", extra=fields(**facts, fingerprint=info.fingerprint[:16]))
        print(f"teacher listening on {self._settings.endpoint.address(port)}", flush=True)
        if self._http_url:
            print(f"HTTP on {self._http_url}", flush=True)


@asynccontextmanager
async def _serve_http(
    settings: TeacherSettings, app: LoadingApp
) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """Serve the HTTP API within the block, if `settings.http` is set.

    Yields the URL, and a function that stops accepting requests. Without `settings.http`, the URL
    is "" and the function does nothing.
    """
    if settings.http is None:
        yield "", lambda: None
    else:
        async with settings.http.serving(app, settings.endpoint) as address_and_stop:
            yield address_and_stop

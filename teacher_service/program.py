"""The running teacher: engine, cache and batcher put together, checked, and served."""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from protos import teacher_pb2_grpc
from protos.errors import DistillError, InvalidInput
from protos.server import Endpoint, serve
from teacher_service.batcher import Batcher
from teacher_service.cache import RowCache
from teacher_service.disk_tier import DiskTier
from teacher_service.engines.base import Engine
from teacher_service.metrics_page import TeacherMetrics
from teacher_service.scorer import Scorer
from teacher_service.self_test import run_self_test
from teacher_service.service import TeacherServicer
from teacher_service.validation import Limits
from teacher_service.weights import Weights

log = logging.getLogger(__name__)

GRACE_SECONDS = 30.0


@dataclass(frozen=True)
class Settings:
    """The options of `distill-teacher`. `cache_dir` None: no cache at all."""

    model: str
    endpoint: Endpoint
    engine: str
    dtype: str
    device: str
    max_top_k: int
    max_batch_tokens: int
    batch_invariant: bool
    cache_dir: Path | None
    cache_memory_bytes: int
    cache_disk_bytes: int


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Raises InvalidInput for settings that cannot work."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    # Before minutes of loading, not after them.
    settings.endpoint.require_usable()
    engine = make_engine(settings)
    run_self_test(engine)
    cache = _make_cache(settings, engine.info.fingerprint)
    with closing(cache) if cache else nullcontext():
        asyncio.run(_serve(settings, engine, cache))
    if cache:
        log.info("cache: %s", cache.counters)


def make_engine(settings: Settings) -> Engine:
    """The engine of that name, loaded. Raises InvalidInput."""
    match settings.engine:
        case "hf":
            from teacher_service.engines.hf import HfEngine

            return HfEngine(
                settings.model,
                dtype=settings.dtype,
                device=settings.device,
                batch_invariant=settings.batch_invariant,
            )
        case "fake":
            from teacher_service.engines.fake import FakeEngine, parse_settings

            return FakeEngine(parse_settings(settings.model))
        case name:
            raise InvalidInput(f"there is no engine {name}", field="--engine", hint="hf or fake")


def _make_cache(settings: Settings, fingerprint: str) -> RowCache | None:
    if settings.cache_dir is None:
        return None
    # A directory a teacher: its rows are of no use to any other.
    path = settings.cache_dir / fingerprint[:32]
    disk = None
    try:
        disk = DiskTier(path, fingerprint=fingerprint, max_bytes=settings.cache_disk_bytes)
    except (DistillError, OSError) as error:
        log.warning("cache: rows are kept in memory only: %s", error)
    return RowCache(memory_bytes=settings.cache_memory_bytes, disk=disk)


async def _serve(settings: Settings, engine: Engine, cache: RowCache | None) -> None:
    info = engine.info
    limits = Limits(info.vocab_size, info.max_length, min(settings.max_top_k, info.vocab_size))
    metrics = TeacherMetrics()
    async with Batcher(
        engine, max_batch_tokens=settings.max_batch_tokens, metrics=metrics
    ) as batcher:
        scorer = Scorer(batcher, cache)
        weights = Weights(engine, batcher)
        servicer = TeacherServicer(scorer, batcher, weights, limits, metrics)

        def register(server: grpc.aio.Server) -> str:
            teacher_pb2_grpc.add_TeacherServicer_to_server(servicer, server)
            return "distill.v1.Teacher"

        def on_ready(port: int) -> None:
            print(f"teacher listening on {settings.endpoint.address(port)}", flush=True)

        await serve(
            register,
            settings.endpoint,
            grace_seconds=GRACE_SECONDS,
            on_ready=on_ready,
            on_stop=servicer.drain,
        )

"""A rollout service in this process, with an engine that a test controls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

import grpc.aio
import torch

from protos import rollouts_pb2_grpc
from protos.rpc.statuses import ErrorBoundary
from protos.rpc.transport import SERVER_OPTIONS
from student_trainer.data.sequence import TailDraws
from student_trainer.rollout_client.order import Order, WeightsVersion
from student_trainer.rollout_service.engines.base import RolloutEngineInfo
from student_trainer.rollout_service.service import RolloutServicer
from student_trainer.rollouts.sampler import SampledTokens

VOCAB = 50_000


class ScriptedEngine:
    """Returns tokens that depend only on a sequence's number, once the test sets `go`."""

    def __init__(self, *, sleeps: bool = False) -> None:
        self.info = RolloutEngineInfo(
            "hf", "scripted", VOCAB, None, "float32", "cpu", sleeps=sleeps
        )
        self.go = threading.Event()
        self.go.set()
        self.error: Exception | None = None  # raised instead of the second sequence
        self.load_error: Exception | None = None
        self.open = 0  # iterators
        self.slept = 0
        self._version = 0

    async def load(self, version: WeightsVersion) -> None:
        if self.load_error is not None:
            raise self.load_error
        self._version = version.number

    async def sample(self, order: Order) -> AsyncGenerator[tuple[int, SampledTokens], None]:
        self.open += 1
        try:
            for index in range(len(order.sequences)):
                while not self.go.is_set():
                    await asyncio.sleep(0.001)
                if index and self.error is not None:
                    raise self.error
                yield index, scripted_tokens(order, index, self._version)
                await asyncio.sleep(0)
        finally:
            self.open -= 1

    async def sleep(self) -> None:
        self.slept += 1

    async def close(self) -> None: ...


def scripted_tokens(order: Order, index: int, version: int) -> SampledTokens:
    request, settings = order.sequences[index], order.settings
    generator = torch.Generator().manual_seed(request.number)
    width = 1 + settings.top_k + settings.draws
    ids = torch.randint(VOCAB, (request.limit, width), generator=generator)
    logprobs = -torch.rand(request.limit, 1 + settings.draws, generator=generator)
    return SampledTokens(
        *(ids[:, 0], ids[:, 1 : 1 + settings.top_k].int(), logprobs[:, 0], True, False),
        TailDraws(ids[:, 1 + settings.top_k :].int(), logprobs[:, 1:]) if settings.draws else None,
        ((version, request.limit),),
    )


@contextmanager
def serve_on_thread(servicer: RolloutServicer) -> Iterator[str]:
    """Serve on a separate thread, and yield the address."""
    ready: list[tuple[str, asyncio.AbstractEventLoop]] = []
    started, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[ErrorBoundary()])
        rollouts_pb2_grpc.add_RolloutsServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ready.append((f"127.0.0.1:{port}", asyncio.get_running_loop()))
        started.set()
        await stop.wait()
        await server.stop(0)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    started.wait()
    try:
        yield ready[0][0]
    finally:
        ready[0][1].call_soon_threadsafe(stop.set)
        thread.join()

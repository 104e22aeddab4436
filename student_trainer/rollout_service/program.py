"""Builds the engine of the rollout service from its settings, and runs the service."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import grpc.aio

from clients.data.hub import hub_error
from clients.preflight.rollouts import gpus_here
from protos import rollouts_pb2_grpc
from protos.errors import InvalidInput
from protos.program.logs import fields
from protos.rpc.metrics_page import MetricsPage, metrics_page
from protos.rpc.server import ServerEndpoint, serve
from protos.vllm_processes import require_vllm
from student_trainer.rollout_service.engines.base import RolloutEngine
from student_trainer.rollout_service.metrics import RolloutMetrics
from student_trainer.rollout_service.service import RolloutServicer

log = logging.getLogger(__name__)

# Time for running orders to end; clients send unfinished orders to another service.
GRACE_SECONDS = 30.0
_VLLM_BATCH_TOKENS = 16384


@dataclass(frozen=True)
class RolloutVllmSettings:
    """Options of the vllm engine.

    - tensor_parallel_size: the number of GPUs.
    - gpu_memory_share: the part of each GPU's memory that vLLM may use, in (0, 1].
    - max_batch_tokens: maximum number of tokens per scheduler step; None: vLLM's choice.
    - sleeps: free the memory of the GPUs when a client requests it.
    """

    tensor_parallel_size: int
    gpu_memory_share: float
    max_batch_tokens: int | None
    sleeps: bool


@dataclass(frozen=True)
class RolloutEngineSettings:
    """The engine and its model. Each field is described by the option of the same name."""

    name: str
    model: str
    revision: str | None
    dtype: str
    lora_rank: int
    device: str
    vllm: RolloutVllmSettings


def run(
    settings: RolloutEngineSettings, endpoint: ServerEndpoint, address: tuple[str, int]
) -> None:
    """Load the engine, and serve until the process receives SIGTERM or SIGINT.

    `address`: (host, port) of the metrics page. Raises InvalidInput for invalid settings.
    """
    metrics = RolloutMetrics()
    page = MetricsPage(metrics.registry)
    with metrics_page(page, address):
        endpoint.require_usable()  # before the model is loaded, which takes minutes
        engine = make_engine(settings)
        asyncio.run(_serve(engine, endpoint, metrics, page))


def make_engine(settings: RolloutEngineSettings) -> RolloutEngine:
    """Load the engine with the name `settings.name`.

    Raises InvalidInput if the engine is unknown, does not support one of the options, or cannot
    load the model.
    """
    vllm = settings.vllm
    model = _resolve_model(settings)
    match settings.name:
        case "hf":
            if vllm.tensor_parallel_size != 1:
                raise _build_option_error("hf", "--tensor-parallel-size", "use --engine vllm")
            if vllm.max_batch_tokens is not None:
                hint = "remove the option: the job sets train.tokens_per_micro_batch"
                raise _build_option_error("hf", "--max-batch-tokens", hint)
            if vllm.sleeps:
                raise _build_option_error("hf", "--sleep", "use --engine vllm")
            from student_trainer.rollout_service.engines.hf import HfRolloutEngine

            return HfRolloutEngine(
                model,
                dtype=settings.dtype,
                lora_rank=settings.lora_rank,
                device=settings.device,
            )
        case "vllm":
            if settings.device != "auto":
                raise _build_option_error("vllm", "--device", "set CUDA_VISIBLE_DEVICES")
            if vllm.sleeps and not gpus_here():
                raise InvalidInput(
                    "needs a GPU, and this machine has none",
                    field="--sleep",
                    hint="remove the option",
                )
            require_vllm()
            from student_trainer.rollout_service.engines.vllm import (
                VllmRolloutEngine,
            )

            vllm_engine: RolloutEngine = VllmRolloutEngine(
                model,
                dtype=settings.dtype,
                lora_rank=settings.lora_rank,
                tensor_parallel_size=vllm.tensor_parallel_size,
                gpu_memory_share=vllm.gpu_memory_share,
                max_batch_tokens=vllm.max_batch_tokens or _VLLM_BATCH_TOKENS,
                sleeps=vllm.sleeps,
            )
            return vllm_engine
        case name:
            raise InvalidInput(f"unknown engine {name!r}", field="--engine", hint="use hf or vllm")


def _resolve_model(settings: RolloutEngineSettings) -> str:
    """Return the model name, or the local directory of its revision if a revision is set."""
    if settings.revision is None:
        return settings.model
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(settings.model, revision=settings.revision))
    except Exception as error:  # errors of the network have many classes
        raise hub_error(
            error,
            f"revision {settings.revision} of {settings.model} cannot be loaded: {error}",
            field="--revision",
            hint="give a commit of a hub id; a directory needs no revision",
        ) from error


def _build_option_error(engine: str, option: str, hint: str) -> InvalidInput:
    return InvalidInput(f"the {engine} engine has no such option", field=option, hint=hint)


async def _serve(
    engine: RolloutEngine, endpoint: ServerEndpoint, metrics: RolloutMetrics, page: MetricsPage
) -> None:
    servicer = RolloutServicer(engine, metrics)
    page.follow(asyncio.get_running_loop())

    def register(server: grpc.aio.Server) -> str:
        rollouts_pb2_grpc.add_RolloutsServicer_to_server(servicer, server)
        return "distill.v1.Rollouts"

    def on_ready(port: int) -> None:
        page.start()
        info = engine.info
        log_fields = {"engine": info.name, "model": info.model, "dtype": info.dtype}
        log.info("serving", extra=fields(**log_fields, device=info.device))
        print(f"rollout service listening on {endpoint.address(port)}", flush=True)

    def on_stop() -> None:
        page.stop()
        servicer.drain()

    try:
        if engine.info.sleeps:
            await engine.sleep()  # after a restart, the trainer may be using the GPU
        await serve(
            register,
            endpoint,
            grace_seconds=GRACE_SECONDS,
            on_ready=on_ready,
            on_stop=on_stop,
        )
    finally:
        await engine.close()

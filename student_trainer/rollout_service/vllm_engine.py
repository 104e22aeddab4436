"""The vllm engine: vLLM batches and schedules the sequences, our sampler runs in its worker.

The records of a sampled sequence stay in the worker until the sequence has ended. They are then
fetched as bytes with one call for all sequences that have ended meanwhile, which vLLM answers
between two steps. With tensor parallelism only rank 0 samples and keeps records; the other ranks
receive its tokens, B ids per step.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from clients.config.tables.common import StudentConfig
from protos.errors import Corrupt, InvalidInput, Unavailable, WrongState
from protos.vllm_processes import (
    SHUTDOWN_SECONDS,
    DeathWatch,
    require_vllm,
    set_environment,
    stdout_on_stderr,
)
from student_trainer.model.loading import computes_in_bfloat16, load_config, load_tokenizer
from student_trainer.rollout_client.order import Order, WeightsVersion
from student_trainer.rollout_client.snapshot import Snapshot, open_snapshot, verify
from student_trainer.rollout_service.engine import EngineInfo
from student_trainer.rollout_service.vllm_running import Ended, RunningOrder, closed_length
from student_trainer.rollout_service.vllm_wire import decode_records, request_fields
from student_trainer.rollouts.sampler import Marks, SampledTokens, end_ids

log = logging.getLogger(__name__)

_WORKER = "student_trainer.rollout_service.vllm_worker.RolloutWorker"
_MARKS_KEPT = 4


class VllmRolloutEngine:
    """A causal language model that transformers and vLLM support, in vLLM's processes.

    The model starts with random weights; `load` brings the first ones. `model`: a Hugging Face
    directory or hub id. `dtype`: of the computation; auto: bfloat16 on a GPU, else float32.
    `gpu_memory_share` is the part of each GPU's memory that vLLM may use, in (0, 1].
    `max_batch_tokens` is vLLM's limit of tokens per scheduler step.

    If a process of vLLM dies, or a load of weights fails after it has begun, this process exits
    with code 1. All methods must be called from one event loop.

    Raises InvalidInput if vLLM is not installed or does not start, or if the model or the dtype
    cannot be used. An order must fit the limits of `info`: its sender checks that.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        tensor_parallel_size: int = 1,
        gpu_memory_share: float = 0.9,
        max_batch_tokens: int = 16384,
    ) -> None:
        require_vllm()
        student = _student(model, dtype)
        try:
            self._tokenizer = load_tokenizer(student)
            skeleton = _skeleton(student)
        except InvalidInput as error:
            raise InvalidInput(error.message, field="--model", hint=error.hint) from error
        config = skeleton.config.get_text_config()
        self._weights = int(skeleton.num_parameters())
        self._tied = bool(config.tie_word_embeddings)
        self._ends = end_ids(skeleton, self._tokenizer)
        self._vocab_size = int(config.vocab_size)
        options = {
            "model": model,
            "dtype": "bfloat16" if computes_in_bfloat16(student) else "float32",
            "tensor_parallel_size": tensor_parallel_size,
            "gpu_memory_utilization": gpu_memory_share,
            "max_num_batched_tokens": max_batch_tokens,
            "max_num_seqs": min(256, max_batch_tokens),
            "worker_cls": _WORKER,
            "additional_config": {"service_pid": os.getpid()},
        }
        try:
            self._llm = _start(options)
        except (ValueError, RuntimeError) as error:
            raise _not_started(model, error) from error
        self._watch = DeathWatch(self._llm, "this rollout service")
        self.info = self._describe(model)
        self._names = itertools.count()
        self._running: set[RunningOrder] = set()
        self._fault: str | None = "no weights were loaded"
        self._loads = 0
        self._marks = lru_cache(_MARKS_KEPT)(lambda texts: Marks(self._tokenizer, texts))
        # Held while weights are replaced and verified, and while records are fetched: nothing that
        # was sampled with weights that are not verified leaves the engine.
        self._loading = asyncio.Lock()

    async def load(self, version: WeightsVersion) -> None:
        """Load the weights of a snapshot, and verify them; see `RolloutEngine.load`.

        A load that has begun goes on if the caller is cancelled.
        """
        self._fault = f"the weights of version {version.number} are not loaded"
        snapshot = await asyncio.to_thread(open_snapshot, version.directory)
        self._check_snapshot(snapshot, version)
        await asyncio.shield(asyncio.ensure_future(self._replace(snapshot, version)))

    async def sample(self, order: Order) -> AsyncGenerator[tuple[int, SampledTokens], None]:
        """Sample the sequences of an order; see `RolloutEngine.sample`.

        Raises WrongState if the engine has no verified weights.
        """
        running = RunningOrder(f"order-{next(self._names)}", order)
        async with self._loading:
            if self._fault is not None:
                raise _unusable(self._fault)
            salt = str(self._loads)
            tasks = [
                asyncio.create_task(self._follow(running, index, salt))
                for index in range(len(order.sequences))
            ]
            self._running.add(running)
        try:
            left = len(tasks)
            while left:
                ended = await running.ended_ones()
                left -= len(ended)
                for index, tokens in zip(
                    [one.index for one in ended], await self._fetch(running, ended), strict=True
                ):
                    yield index, tokens
        finally:
            self._running.discard(running)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._llm.collective_rpc("drop_order", args=(running.name,))

    async def close(self) -> None:
        """Stop vLLM's processes. Calling it twice is safe."""
        self._watch.close()
        # Not in a thread: vLLM's own tasks would see its processes end, and log that as an error.
        self._llm.shutdown(SHUTDOWN_SECONDS)

    async def _replace(self, snapshot: Snapshot, version: WeightsVersion) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        async with self._loading:
            assert version.in_flight != "drain" or not self._running, "drain waits for all orders"
            # The blocks of older weights in the prefix cache are not cleared but not found any
            # more: the cache salt of a request names the load before it.
            self._loads += 1
            recompute = version.in_flight == "recompute"
            await self._llm.pause_generation(mode="keep", clear_cache=recompute)
            try:
                await self._llm.collective_rpc(
                    "load_snapshot",
                    args=(str(snapshot.directory), version.number, list(snapshot.files)),
                )
            except Exception as error:
                log.exception("the load of %s failed", snapshot.directory)
                self._watch.exit(f"the load of version {version.number} failed: {error}")
            await self._llm.resume_generation()
            try:
                await self._verify(snapshot)
            except EngineDeadError as error:
                self._watch.check()
                raise _stopping() from error
            except Exception as error:
                self._fault = str(error)
                for running in self._running:
                    running.fail(error)
                raise
            self._fault = None

    async def _verify(self, snapshot: Snapshot) -> None:
        probe = snapshot.probe()
        found = torch.stack(
            await asyncio.gather(*(self._logprobs_of(row) for row in probe.token_ids))
        )
        computed = self.info.dtype
        verify(probe, lambda _: found, snapshot.dtype if computed == "float32" else computed)

    async def _logprobs_of(self, token_ids: Tensor) -> Tensor:
        """Return the log-probs [T - 1] of token ids [T] after those before them, from vLLM."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        ids = token_ids.tolist()
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        name = f"probe-{next(self._names)}"
        async for output in self._llm.generate(tokens_input(ids), params, name):
            found = output.prompt_logprobs
        return torch.tensor(
            [of[token].logprob for of, token in zip(found[1:], ids[1:], strict=True)]
        )

    async def _follow(self, running: RunningOrder, index: int, salt: str) -> None:
        """Have vLLM sample a sequence, and put its end, or its error, into the queue."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            running.put(await self._ended(running, index, salt))
        except EngineDeadError:
            self._watch.check()
            running.fail(_stopping())
        except Exception as error:
            running.fail(error)

    async def _ended(self, running: RunningOrder, index: int, salt: str) -> Ended:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        order = running.order
        sequence = order.sequences[index]
        marks = self._marks(order.settings.marks) if order.settings.marks else None
        params = SamplingParams(
            max_tokens=sequence.limit,
            stop_token_ids=self._ends,
            ignore_eos=True,  # `_ends` has it
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if marks else RequestOutputKind.FINAL_ONLY,
            extra_args=request_fields(running.name, order, index),
        )
        prompt = tokens_input(sequence.token_ids.tolist(), cache_salt=salt)
        tokens: list[int] = []
        async with aclosing(
            self._llm.generate(prompt, params, f"{running.name}-{index}")
        ) as outputs:
            async for output in outputs:
                (found,) = output.outputs
                before = len(tokens)
                tokens += found.token_ids
                length = closed_length(tokens, before, marks) if marks else None
                if length is not None:
                    return Ended(index, length, ended=False, closed=True)
        if found.finish_reason not in ("stop", "length"):
            raise Unavailable(f"vLLM gave up a sequence: {found.finish_reason}")
        return Ended(index, len(tokens), ended=tokens[-1] in self._ends, closed=False)

    async def _fetch(self, running: RunningOrder, ended: list[Ended]) -> list[SampledTokens]:
        """Return what was sampled for sequences that have ended; waits for a load."""
        settings = running.order.settings
        async with self._loading:
            if running.fault is not None:
                raise running.fault
            wanted = [(one.index, one.length) for one in ended]
            # The other ranks return nothing.
            found, *_ = await self._llm.collective_rpc("take_records", args=(running.name, wanted))
        return [
            decode_records(
                data,
                top_k=settings.top_k,
                draws=0 if settings.seed is None else settings.draws,
                ended=one.ended,
                closed=one.closed,
            )
            for data, one in zip(found, ended, strict=True)
        ]

    def _check_snapshot(self, snapshot: Snapshot, version: WeightsVersion) -> None:
        """Raise Corrupt if a snapshot is of another version or model."""
        if snapshot.number != version.number:
            raise Corrupt(
                f"{snapshot.directory} has version {snapshot.number}, not {version.number}"
            )
        # Tensors of a snapshot are mapped files: this reads no weight.
        found = sum(
            tensor.numel()
            for name, tensor in snapshot.tensors()
            if not (self._tied and name == "lm_head.weight")
        )
        if found != self._weights:
            raise Corrupt(
                f"{snapshot.directory} has {found} weights, but {self.info.model} has"
                f" {self._weights}",
                hint="start the rollout service with the model that is trained",
            )

    def _describe(self, model: str) -> EngineInfo:
        config = self._llm.vllm_config
        return EngineInfo(
            name="vllm",
            model=model,
            vocab_size=self._vocab_size,
            max_length=config.model_config.max_model_len,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            device=config.device_config.device_type,
        )


def _student(model: str, dtype: str) -> StudentConfig:
    if dtype not in ("auto", "float32", "bfloat16"):
        raise InvalidInput(
            f"unknown dtype {dtype!r}", field="--dtype", hint="use auto, float32 or bfloat16"
        )
    return StudentConfig(model=model, dtype=dtype)


def _skeleton(student: StudentConfig) -> Any:
    """Return the model without its weights, with the generation config that transformers loads."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(student))
    with suppress(OSError):  # without a file, that of the model's config
        model.generation_config = GenerationConfig.from_pretrained(student.model)
    return model


def _start(options: dict[str, Any]) -> Any:
    set_environment()
    # The runner whose sampler can be replaced.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        **options,
        # The longest context that fits in memory, at most the model's own maximum.
        max_model_len=-1,
        skip_tokenizer_init=True,
        trust_remote_code=False,
        load_format="dummy",
        disable_log_stats=True,
        enable_prefix_caching=True,
        generation_config="vllm",  # no settings of the model's own
        # On a CPU a compiled model has the weights that it was compiled with.
        enforce_eager=not torch.cuda.is_available(),
    )
    # Ctrl-C reaches every process of the terminal, but vLLM must run until the last sequence is
    # sent. vLLM's processes inherit the signal mask of this thread, so they ignore SIGINT.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with stdout_on_stderr():
            return AsyncLLM.from_engine_args(arguments)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stopping() -> Unavailable:
    return Unavailable("the rollout service is stopping", hint="start it again")


def _unusable(fault: str) -> WrongState:
    return WrongState(
        f"the rollout engine has no verified weights: {fault}", hint="send the order again"
    )


def _not_started(model: str, error: Exception) -> InvalidInput:
    reason = " ".join(str(error).split())[:300]
    return InvalidInput(
        f"vLLM does not start with {model}: {reason}",
        field="--model",
        hint="read vLLM's log above; for memory, set --gpu-memory-share or --tensor-parallel-size",
    )

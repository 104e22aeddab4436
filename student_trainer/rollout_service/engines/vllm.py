"""The vllm engine: vLLM batches and schedules the sequences; this package's sampler draws tokens.

The sampler runs in vLLM's worker. The records of a sequence (log-probs, head ids, draws) stay in
the worker until the sequence has ended. Then one call fetches, as bytes, the records of all
sequences that have ended since the last call. vLLM answers this call between two steps. With tensor
parallelism, only rank 0 samples and keeps records. The other ranks receive its tokens, B ids per
step.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from clients.config.tables.common import StudentConfig
from clients.data.tokens.answers import end_ids
from protos.errors import InvalidInput, Unavailable, WrongState
from protos.rpc.failpoints import failpoint
from protos.vllm_processes import SHUTDOWN_SECONDS, DeathWatch, require_vllm
from student_trainer.model.loading import computes_in_bfloat16, load_config, load_tokenizer
from student_trainer.model.lora import add_adapters
from student_trainer.rollout_client.order import Order, WeightsVersion
from student_trainer.rollout_client.snapshot import Snapshot, verify
from student_trainer.rollout_service.engines.base import RolloutEngineInfo
from student_trainer.rollout_service.engines.student_model import (
    open_version,
    snapshot_shapes,
    student_config,
)
from student_trainer.rollout_service.engines.vllm_running import (
    EndedSequence,
    RunningOrder,
    closed_length,
)
from student_trainer.rollout_service.engines.vllm_start import Adapters, start_vllm
from student_trainer.rollout_service.engines.vllm_wire import (
    ADAPTERS,
    decode_records,
    request_fields,
)
from student_trainer.rollouts.sampler import Marks, SampledTokens

log = logging.getLogger(__name__)

_MARKS_CACHE_SIZE = 4


class VllmRolloutEngine:
    """A rollout engine with a causal language model in vLLM's processes.

    Transformers and vLLM must both support the model. It has random weights until the first `load`.

    - model: a Hugging Face directory or hub id.
    - dtype: the dtype of the computation; auto means bfloat16 on a GPU, else float32.
    - lora_rank: see `student_config`.
    - gpu_memory_share: the part of each GPU's memory that vLLM may use, in (0, 1].
    - max_batch_tokens: vLLM's limit of tokens per scheduler step.
    - sleeps: the method `sleep` frees the GPU's memory; this needs a GPU.

    If a process of vLLM dies, or if a load of weights fails after it has begun, this process exits
    with code 1. All methods must be called from one event loop.

    Raises InvalidInput if vLLM is not installed or does not start, or if the model or the dtype
    cannot be used. The caller must check that orders respect the limits of `info`.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        lora_rank: int = 0,
        tensor_parallel_size: int = 1,
        gpu_memory_share: float = 0.9,
        max_batch_tokens: int = 16384,
        sleeps: bool = False,
    ) -> None:
        require_vllm()
        student = student_config(model, dtype, lora_rank)
        try:
            self._tokenizer = load_tokenizer(student)
            skeleton = _load_skeleton(student)
        except InvalidInput as error:
            raise InvalidInput(error.message, field="--model", hint=error.hint) from error
        self._shapes = snapshot_shapes(skeleton)
        self._ends = end_ids(skeleton.generation_config, self._tokenizer)
        self._vocab_size = int(skeleton.config.get_text_config().vocab_size)
        self._lora_rank = lora_rank
        adapters = None
        if lora_rank:  # named ...LAYER.lora_A.weight
            layers = {name.split(".")[-3] for name in self._shapes}
            adapters = Adapters(lora_rank, sorted(layers))
        self._llm = start_vllm(
            model,
            dtype="bfloat16" if computes_in_bfloat16(student) else "float32",
            adapters=adapters,
            tensor_parallel_size=tensor_parallel_size,
            gpu_memory_share=gpu_memory_share,
            max_batch_tokens=max_batch_tokens,
            sleeps=sleeps,
        )
        self._watch = DeathWatch(self._llm, "this rollout service")
        self.info = self._describe_engine(model, sleeps)
        self._asleep = False
        self._names = itertools.count()
        self._running_orders: set[RunningOrder] = set()
        self._fault: str | None = "no weights were loaded"
        self._loads = 0
        self._marks = lru_cache(_MARKS_CACHE_SIZE)(lambda texts: Marks(self._tokenizer, texts))
        # Held while weights are replaced and verified, and while records are fetched: no token that
        # was sampled with unverified weights leaves the engine.
        self._loading = asyncio.Lock()

    async def load(self, version: WeightsVersion) -> None:
        """Load the weights of a snapshot, and verify them; see `RolloutEngine.load`.

        If the caller is cancelled, a load that has started continues.
        """
        self._fault = f"the weights of version {version.number} are not loaded"
        snapshot = await asyncio.to_thread(open_version, version, self._shapes)
        replacing = self._replace_weights(version, snapshot)
        await asyncio.shield(asyncio.ensure_future(replacing))

    async def sample(self, order: Order) -> AsyncGenerator[tuple[int, SampledTokens], None]:
        """Sample the sequences of an order; see `RolloutEngine.sample`.

        Raises WrongState if the engine has no verified weights.
        """
        running_order = RunningOrder(f"order-{next(self._names)}", order)
        async with self._loading:
            if self._fault is not None:
                raise _unusable_error(self._fault)
            for index in range(len(order.sequences)):
                self._submit(running_order, index)
            self._running_orders.add(running_order)
        try:
            remaining = len(order.sequences)
            while remaining:
                ended_sequences = await running_order.wait_for_ended()
                remaining -= len(ended_sequences)
                for index, tokens in zip(
                    [sequence.index for sequence in ended_sequences],
                    await self._fetch_tokens(running_order, ended_sequences),
                    strict=True,
                ):
                    yield index, tokens
        finally:
            self._running_orders.discard(running_order)
            await running_order.cancel(running_order.tasks)
            await self._llm.collective_rpc("drop_order", args=(running_order.name,))

    async def sleep(self) -> None:
        """Free the memory of the GPU until the next `load`; see `RolloutEngine.sleep`.

        For a student with adapters, the weights of the base model are kept in the CPU's memory. On
        a CPU, vLLM frees no memory.
        """
        async with self._loading:
            assert not self._running_orders, "sleep is called while an order runs"
            self._fault = "they were dropped when it fell asleep"
            await self._llm.sleep(level=1 if self._lora_rank else 2)
            self._asleep = True

    async def close(self) -> None:
        """Stop vLLM's processes. May be called twice."""
        self._watch.close()
        # Do not call this in a thread: vLLM's tasks would see its processes end, and log an error.
        self._llm.shutdown(SHUTDOWN_SECONDS)

    async def _replace_weights(self, version: WeightsVersion, snapshot: Snapshot) -> None:
        """Replace the weights by the snapshot of `version`, and verify the new weights."""
        from vllm.v1.engine.exceptions import EngineDeadError

        async with self._loading:
            assert version.in_flight != "drain" or not self._running_orders, (
                "drain waits for all orders"
            )
            # Prefix-cache blocks of older weights are not cleared, but later requests do not match
            # them, because the cache salt of a request names the last load.
            self._loads += 1
            recompute = version.in_flight == "recompute"
            if not self._asleep:
                await self._llm.pause_generation(mode="keep", clear_cache=recompute)
            failpoint("generation-paused")
            try:
                if self._asleep:
                    await self._llm.wake_up(["weights"])
                rpc_arguments = str(snapshot.directory), version.number, list(snapshot.files)
                await self._llm.collective_rpc("load_snapshot", args=rpc_arguments)
                if self._asleep:  # only now: the load needs memory that it frees afterwards
                    await self._llm.wake_up(["kv_cache"])
                    self._asleep = False
                if version.in_flight == "keep":
                    for running_order in self._running_orders:
                        await self._resubmit_unstarted(running_order)
            except Exception as error:
                log.exception("the load of version %d failed", version.number)
                self._watch.exit(f"the load of version {version.number} failed: {error}")
            await self._llm.resume_generation()
            failpoint("generation-resumed")
            try:
                await self._verify_probe(snapshot)
                failpoint("probe-scored")
            except EngineDeadError as error:
                self._watch.check()
                raise _stopping_error() from error
            except Exception as error:
                self._fault = str(error)
                for running_order in self._running_orders:
                    running_order.fail(error)
                raise
            self._fault = None

    async def _verify_probe(self, snapshot: Snapshot) -> None:
        probe = snapshot.probe()
        logprobs = torch.stack(
            await asyncio.gather(*(self._score_tokens(row) for row in probe.token_ids))
        )
        engine_dtype = self.info.dtype
        dtype = snapshot.dtype if engine_dtype == "float32" else engine_dtype
        verify(probe, lambda _: logprobs, dtype)

    async def _score_tokens(self, token_ids: Tensor) -> Tensor:
        """Return vLLM's log-prob of each token of `token_ids` [T] except the first, [T - 1]."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        ids = token_ids.tolist()
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        name = f"probe-{next(self._names)}"
        prompt, adapters = tokens_input(ids), self._lora_request()
        async for output in self._llm.generate(prompt, params, name, lora_request=adapters):
            prompt_logprobs = output.prompt_logprobs
        return torch.tensor(
            [
                position_logprobs[token].logprob
                for position_logprobs, token in zip(prompt_logprobs[1:], ids[1:], strict=True)
            ]
        )

    def _submit(self, running_order: RunningOrder, index: int) -> None:
        """Submit a sequence to vLLM.

        Sequences share blocks of vLLM's prefix cache only if no load of weights lies between them.
        """
        salt = str(self._loads)
        running_order.tasks[index] = asyncio.create_task(
            self._follow_sequence(running_order, index, salt)
        )

    async def _resubmit_unstarted(self, running_order: RunningOrder) -> None:
        """Submit again the sequences that vLLM has not started, after a load that keeps the cache.

        These sequences have no KV cache of their own yet. They must not use blocks of the prefix
        cache that were computed with the older weights.
        """
        # Only rank 0 is needed.
        started_indices, *_ = await self._llm.collective_rpc(
            "started_sequences", args=(running_order.name,)
        )
        unstarted_indices = [
            index
            for index, task in running_order.tasks.items()
            if index not in started_indices and not task.done()
        ]
        await running_order.cancel(unstarted_indices)
        for index in unstarted_indices:
            self._submit(running_order, index)

    async def _follow_sequence(self, running_order: RunningOrder, index: int, salt: str) -> None:
        """Sample a sequence with vLLM, and put the ended sequence or the error into the queue."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            running_order.put(await self._sample_sequence(running_order, index, salt))
        except EngineDeadError:
            self._watch.check()
            running_order.fail(_stopping_error())
        except Exception as error:  # noqa: BLE001 (the order fails with it)
            running_order.fail(error)

    async def _sample_sequence(
        self, running_order: RunningOrder, index: int, salt: str
    ) -> EndedSequence:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        order = running_order.order
        sequence = order.sequences[index]
        marks = self._marks(order.settings.marks) if order.settings.marks else None
        ends = list(order.settings.end_ids) or self._ends
        params = SamplingParams(
            max_tokens=sequence.limit,
            stop_token_ids=ends,
            ignore_eos=True,  # `ends` contains the model's end token
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if marks else RequestOutputKind.FINAL_ONLY,
            extra_args=request_fields(running_order.name, order, index),
        )
        prompt = tokens_input(sequence.token_ids.tolist(), cache_salt=salt)
        tokens: list[int] = []
        async with aclosing(
            self._llm.generate(
                prompt,
                params,
                f"{running_order.name}-{index}-{salt}",
                lora_request=self._lora_request(),
            )
        ) as outputs:
            async for output in outputs:
                (completion,) = output.outputs
                old_length = len(tokens)
                tokens += completion.token_ids
                length = closed_length(tokens, old_length, marks) if marks else None
                if length is not None:
                    return EndedSequence(index, length, ended=False, closed=True)
        if completion.finish_reason not in ("stop", "length"):
            raise Unavailable(
                f"vLLM ended a sequence early: finish_reason {completion.finish_reason!r}",
                hint="see the log of the rollout service",
            )
        return EndedSequence(index, len(tokens), ended=tokens[-1] in ends, closed=False)

    async def _fetch_tokens(
        self, running_order: RunningOrder, ended_sequences: list[EndedSequence]
    ) -> list[SampledTokens]:
        """Return the sampled tokens of sequences that have ended.

        If a load of weights runs, wait for its end.
        """
        settings = running_order.order.settings
        async with self._loading:
            if running_order.fault is not None:
                raise running_order.fault
            index_lengths = [(sequence.index, sequence.length) for sequence in ended_sequences]
            # The other ranks return nothing.
            records, *_ = await self._llm.collective_rpc(
                "take_records", args=(running_order.name, index_lengths)
            )
        return [
            decode_records(
                data,
                top_k=settings.top_k,
                draws=0 if settings.seed is None else settings.draws,
                ended=sequence.ended,
                closed=sequence.closed,
            )
            for data, sequence in zip(records, ended_sequences, strict=True)
        ]

    def _lora_request(self) -> Any:
        """Return the argument of a vLLM request that selects the student's adapters.

        None if the student has no adapters.
        """
        if not self._lora_rank:
            return None
        from vllm.lora.request import LoRARequest

        # vLLM would read the path only if no adapters were loaded.
        return LoRARequest("student", ADAPTERS, "/no adapters are loaded")

    def _describe_engine(self, model: str, sleeps: bool) -> RolloutEngineInfo:
        config = self._llm.vllm_config
        return RolloutEngineInfo(
            name="vllm",
            model=model,
            vocab_size=self._vocab_size,
            max_length=config.model_config.max_model_len,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            device=config.device_config.device_type,
            lora_rank=self._lora_rank,
            sleeps=sleeps,
        )


def _load_skeleton(student: StudentConfig) -> Any:
    """Return the model without weights, with the same generation config as transformers loads."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(student))
        if student.lora is not None:
            add_adapters(model, student)
    with suppress(OSError):  # without the file, keep the generation config of the model's config
        model.generation_config = GenerationConfig.from_pretrained(student.model)
    return model


def _stopping_error() -> Unavailable:
    return Unavailable("the rollout service is stopping", hint="start the service again")


def _unusable_error(fault: str) -> WrongState:
    return WrongState(
        f"the rollout engine has no verified weights: {fault}", hint="send the order again"
    )

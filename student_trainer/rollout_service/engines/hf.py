"""The hf engine: samples orders with transformers.

The results are bit-identical to those of sampling in the trainer's own process.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from protos.errors import InvalidInput, WrongState
from protos.rpc.failpoints import failpoint
from student_trainer.model.loading import computes_in_bfloat16, load_model, load_tokenizer
from student_trainer.model.lora import has_adapters, load_adapters, scale_adapters
from student_trainer.rollout_client.order import Order, SequenceRequest, WeightsVersion
from student_trainer.rollout_client.snapshot import verify
from student_trainer.rollout_service.engines.base import RolloutEngineInfo
from student_trainer.rollout_service.engines.student_model import (
    open_version,
    snapshot_shapes,
    student_config,
)
from student_trainer.rollouts.rollouts import batches
from student_trainer.rollouts.sampler import Marks, SampledTokens, Sampler, rollout_noise
from student_trainer.rollouts.sampling_probe import probe_sampling

Returned = TypeVar("Returned")


class HfRolloutEngine:
    """A rollout engine with a causal language model of transformers, in float32 weights.

    The sequences of an order are divided into batches in the same way as `HuggingFaceRollouts`
    divides prompts. So the same order with the same weights gives bit-identical results,
    independent of other orders. One thread samples all batches. The next batch is always that of
    the oldest waiting order.
    """

    def __init__(
        self, model: str, *, dtype: str = "auto", lora_rank: int = 0, device: str = "auto"
    ) -> None:
        """Load the model.

        - model: a directory or hub id.
        - dtype: the dtype of the computation: auto (bfloat16 on a GPU that supports it), float32 or
          bfloat16.
        - lora_rank: see `student_config`.

        Raises InvalidInput, with the option as field, if the model, the dtype or the device cannot
        be used.
        """
        student = student_config(model, dtype, lora_rank)
        try:
            self._tokenizer = load_tokenizer(student)
            model_on_cpu = load_model(student)
        except InvalidInput as error:
            raise InvalidInput(error.message, field="--model", hint=error.hint) from error
        self._model = model_on_cpu.to(_open_device(device)).eval()
        self._bf16 = computes_in_bfloat16(student)
        probe = probe_sampling(self._model, self._tokenizer, bf16=self._bf16)
        if probe.fault is not None:
            raise InvalidInput(probe.fault, field="--model", hint="use --engine vllm")
        self._equal_lengths = probe.equal_lengths
        self._shapes = snapshot_shapes(self._model)
        self._marks: tuple[tuple[str, ...], Marks] | None = None
        self._version: int | None = None  # of the weights; None: not verified
        self._turns = _TurnQueue()
        self._orders = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        config = self._model.config.get_text_config()
        self._info = RolloutEngineInfo(
            name="hf",
            model=model,
            vocab_size=int(config.vocab_size),
            max_length=getattr(config, "max_position_embeddings", None),
            dtype="bfloat16" if self._bf16 else "float32",
            device=str(self._model.device),
            in_flight=("drain",),
            lora_rank=lora_rank,
        )

    @property
    def info(self) -> RolloutEngineInfo:
        """Return the properties of the engine: its model, its limits and its device."""
        return self._info

    async def load(self, version: WeightsVersion) -> None:
        """Copy the weights of a snapshot into the model; see `RolloutEngine.load`."""
        await self._in_thread(lambda: self._load_snapshot(version))

    async def sample(self, order: Order) -> AsyncGenerator[tuple[int, SampledTokens], None]:
        """Yield the sequences of each batch when the batch is finished; see `RolloutEngine.sample`.

        If the caller closes the iterator, the current batch ends at its next token.
        """
        age, self._orders = self._orders, self._orders + 1
        closed = threading.Event()
        lengths = [len(request.token_ids) for request in order.sequences]
        max_tokens = max(request.limit for request in order.sequences)
        try:
            for batch in batches(lengths, max_tokens, order.settings.batch_tokens):
                await self._turns.acquire(age)
                try:
                    sampled = await self._in_thread(
                        partial(self._sample_batch, order, batch, closed)
                    )
                finally:
                    self._turns.release()
                for index, tokens in enumerate(sampled, batch.start):
                    yield index, tokens
        finally:
            closed.set()

    async def sleep(self) -> None:
        """Do nothing: this engine does not sleep."""

    async def close(self) -> None:
        """Wait for the running batch, and end the thread."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], Returned]) -> Returned:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _sample_batch(
        self, order: Order, batch: slice, closed: threading.Event
    ) -> Sequence[SampledTokens]:
        if self._version is None:
            raise WrongState(
                "the rollout engine has no verified weights", hint="send the order again"
            )
        settings = order.settings
        sampler = Sampler(
            self._model,
            self._tokenizer,
            top_k=settings.top_k,
            temperature=settings.temperature,
            draws=settings.draws,
            vocab_size=settings.vocab_size,
            bf16=self._bf16,
            equal_lengths=self._equal_lengths,
            ends=settings.end_ids,
        )
        requests = order.sequences[batch]
        noise = draw_noise = None
        if settings.seed is not None:
            noise = [_request_noise(request, order, draws=False) for request in requests]
            draw_noise = [_request_noise(request, order, draws=True) for request in requests]
        completions = sampler.write(
            [request.token_ids for request in requests],
            [request.limit for request in requests],
            noise,
            self._cached_marks(settings.marks),
            draw_noise,
            closed.is_set,
        )
        failpoint("batch-sampled")
        return [
            replace(completion, versions=((self._version, len(completion.token_ids)),))
            for completion in completions
        ]

    def _cached_marks(self, texts: tuple[str, ...]) -> Marks | None:
        if not texts:
            return None
        if self._marks is None or self._marks[0] != texts:
            self._marks = texts, Marks(self._tokenizer, texts)  # decodes the whole vocabulary
        return self._marks[1]

    @torch.no_grad()
    def _load_snapshot(self, version: WeightsVersion) -> None:
        self._version = None
        snapshot = open_version(version, self._shapes)
        if has_adapters(self._model):
            load_adapters(snapshot.directory, self._model)
            scale_adapters(snapshot.directory, self._model)
        else:
            _copy_weights(snapshot.shapes().keys(), snapshot.tensors(), self._model)
        failpoint("weights-copied")
        dtype = self._info.dtype if snapshot.dtype == "float32" else snapshot.dtype
        verify(snapshot.probe(), self._score_tokens, dtype)
        self._version = version.number

    def _score_tokens(self, token_ids: Tensor) -> Tensor:
        """Return the log-probs [n, T - 1] of all tokens of token_ids [n, T] except the first."""
        logprobs = []
        for row in token_ids.to(self._model.device):
            with torch.autocast(row.device.type, torch.bfloat16, enabled=self._bf16):
                logits = self._model(input_ids=row[None, :-1], use_cache=False).logits[0]
            logprobs.append(logits.float().log_softmax(1).gather(1, row[1:, None]).squeeze(1).cpu())
        return torch.stack(logprobs)


def _request_noise(request: SequenceRequest, order: Order, *, draws: bool) -> Tensor:
    settings = order.settings
    assert settings.seed is not None
    stream = rollout_noise(request.number, settings.seed, settings.stream_tokens, draws=draws)
    return stream[request.used : request.used + request.limit]


def _copy_weights(names: Set[str], weights: Iterable[tuple[str, Tensor]], model: Any) -> None:
    """Copy the weights of a snapshot into `model`. `names`: the names of these weights."""
    model_weights: Mapping[str, Tensor] = model.state_dict()
    if model_weights.keys() >= names:
        for name, weight in weights:
            model_weights[name].copy_(weight)
        return
    # transformers converts some weight formats while loading: for example, it stacks the experts of
    # Qwen3-MoE.
    converted_model = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=dict(weights),
        dtype=torch.float32,
    )
    for name, weight in converted_model.state_dict().items():
        model_weights[name].copy_(weight)


def _open_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        # Only an allocation shows that the device exists and is usable.
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise InvalidInput(
            f"device {name!r} is not available on this machine",
            field="--device",
            hint="use auto or cpu",
        ) from error


class _TurnQueue:
    """A queue for the engine thread, which samples one batch at a time. The oldest order is first.

    While the client of an order reads slowly, the order is not in the queue, so it does not delay
    other orders.
    """

    def __init__(self) -> None:
        self._is_busy = False
        self._queue: list[tuple[int, asyncio.Future[None]]] = []

    async def acquire(self, age: int) -> None:
        """Wait until the engine thread is free for this order.

        `age`: the number of the order. An order has at most one batch in the queue.
        """
        if not self._is_busy:
            self._is_busy = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (age, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Release the engine thread."""
        while self._queue:
            with suppress(asyncio.InvalidStateError):
                heapq.heappop(self._queue)[1].set_result(None)
                return
        self._is_busy = False

"""The vllm engine: vLLM computes hidden states; our head in vLLM's worker computes the rows.

The engine uses vLLM's pooling runner. vLLM batches, pages and splits long prompts, and skips tokens
that are in its prefix cache. A cached token has no hidden state, so the first request does not
return the rows that need such a state. If rows are missing, a second, shorter request that does not
read the cache computes them. The two requests together compute each token once, as without a cache.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from clients.data.models.files import quantisation_of
from clients.data.tokens.tokenizer import default_template_in
from clients.teacher.query import ScoreQuery, tokenizer_fingerprint
from protos.errors import Corrupt, DistillError, InvalidInput
from protos.rows.codec import RowBlock, concatenate
from protos.vllm_processes import executor, require_vllm
from teacher_service.engines.base import (
    QuerySchedule,
    ScoringEngineInfo,
    compute_fingerprint,
    with_adapters,
)
from teacher_service.engines.vllm_process import (
    OWN_OPTIONS,
    VllmProcess,
    read_options,
    select_changing_options,
)
from teacher_service.engines.vllm_wire import PACE, decode_answer, encode_query, slice_query
from teacher_service.head.linear_head import HeadTensors, find_head
from teacher_service.models.adapters import OPTION, Adapter
from teacher_service.models.digests import FileDigests
from teacher_service.models.files import (
    file_facts,
    model_directory,
    release_of,
    weight_files,
)
from teacher_service.models.load_progress import LoadProgress, read_failure
from teacher_service.models.loading import load_skeleton, load_vocabulary, max_length_of

_SCHEDULER = "teacher_service.engines.vllm_scheduler.SharingScheduler"
_WORKER = "teacher_service.engines.vllm_worker.ScoringWorker"
# Arguments of vLLM that some teachers set, so that they cannot be an `--engine-option`.
_CONDITIONAL_OPTIONS = frozenset(
    [
        *("distributed_executor_backend", "hf_overrides", "enable_lora", "max_loras"),
        *("max_lora_rank", "lora_target_modules"),
    ]
)
# The values that vLLM accepts as the largest rank of adapters.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

DEFAULT_SCHEDULE = QuerySchedule()


class VllmEngine:
    """A causal language model that transformers and vLLM support, with a linear head.

    Its logits may be scaled or capped.

    `gpu_memory_share` is the part of each GPU's memory that vLLM may use, in (0, 1].
    `max_batch_tokens` is vLLM's limit of tokens per scheduler step.

    Raises InvalidInput if vLLM is not installed or does not start, if the model directory or the
    dtype cannot be used, or if the logits are not one linear layer of the hidden states, scaled or
    capped.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        tensor_parallel_size: int = 1,
        gpu_memory_share: float = 0.9,
        max_batch_tokens: int = 16384,
        adapters: Sequence[Adapter] = (),
        options: Sequence[str] = (),
        progress: LoadProgress | None = None,
    ) -> None:
        """Start vLLM and report the stages to `progress`. Queries may name one of `adapters`.

        `options` are further options of vLLM, each NAME=VALUE; see `read_options`.
        """
        progress = progress or LoadProgress()
        require_vllm()
        path = model_directory(model, "vllm")
        digests = FileDigests(weight_files(path))
        skeleton = load_skeleton(path, dtype=dtype)
        head = find_head(skeleton, path)
        tokens = load_vocabulary(path)
        arguments = {
            "tensor_parallel_size": tensor_parallel_size,
            "gpu_memory_utilization": gpu_memory_share,
            **_build_arguments(path, skeleton, head, max_batch_tokens),
            **_build_lora_options(adapters),
        }
        extra_options = read_options(options, OWN_OPTIONS | _CONDITIONAL_OPTIONS | arguments.keys())
        arguments |= extra_options
        if not extra_options:  # with options, vLLM decides: one process may not be enough
            arguments["distributed_executor_backend"] = executor(tensor_parallel_size)
        progress.begin("starting vLLM and reading its weights")
        with progress.follow_process() as file:
            arguments["additional_config"]["progress_file"] = str(file)
            try:
                self._vllm = VllmProcess(arguments)
            except (ValueError, RuntimeError) as error:
                raise _startup_error(path, read_failure(file) or str(error)) from error
        for number, adapter in enumerate(adapters, 1):
            progress.begin(f"reading the adapter {adapter.name}")
            self._load_adapter(adapter, number)
        progress.begin("computing the digests of its files")
        cache = self._vllm.config.cache_config
        self._block_tokens = cache.block_size if cache.enable_prefix_caching else None
        info = self._describe(model, path, head, tokens, digests, extra_options)
        self.info = with_adapters(info, adapters)

    def score(self, queries: Sequence[ScoreQuery]) -> list[RowBlock | DistillError]:
        """Return one result for each query, in order.

        A query whose logits are not finite gets Corrupt. If a process of vLLM dies, this process
        exits with code 1.
        """
        return self._vllm.run(self._score_all(queries))

    async def score_one(self, query: ScoreQuery, schedule: QuerySchedule) -> RowBlock:
        """Return the rows of a query, from any event loop; see ContinuousEngine.

        Raises Corrupt if its logits are not finite. If a process of vLLM dies, this process exits
        with code 1.
        """
        return await asyncio.wrap_future(self._vllm.begin(self._compute_rows(query, schedule)))

    @property
    def step_tokens(self) -> int:
        """Maximum number of tokens of one step, summed over vLLM's data-parallel schedulers."""
        config = self._vllm.config
        schedulers = config.parallel_config.data_parallel_size
        return int(config.scheduler_config.max_num_batched_tokens * schedulers)

    @property
    def cached_tokens(self) -> int:
        """Number of tokens since the start that came from vLLM's prefix cache."""
        return self._vllm.cached_tokens

    def steps(self) -> tuple[int, int]:
        """Return the numbers of vLLM's steps and of their tokens since the start."""
        steps, tokens = self._vllm.call_worker("steps")
        return steps, tokens

    def close(self) -> None:
        """Stop vLLM's processes. Calling it twice is safe."""
        self._vllm.close()

    async def _score_all(self, queries: Sequence[ScoreQuery]) -> list[RowBlock | DistillError]:
        answers = await asyncio.gather(
            *(self._compute_rows(query) for query in queries), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, DistillError):
                raise answer
        return [answer for answer in answers if isinstance(answer, RowBlock | DistillError)]

    async def _compute_rows(
        self, query: ScoreQuery, schedule: QuerySchedule = DEFAULT_SCHEDULE
    ) -> RowBlock:
        # A prefix shorter than a block is never in the cache.
        if self._block_tokens is None or query.start <= self._block_tokens:
            return await self._request_rows(query, schedule, read_cache=False)
        try:
            block = await self._request_rows(query, schedule, read_cache=True)
        except Corrupt:
            # The NaN may be from a cached block of another sequence: compute without the cache.
            return await self._request_rows(query, schedule, read_cache=False)
        missing_rows = query.rows - len(block)
        if not missing_rows:
            return block
        first_part = slice_query(query, query.start, query.start + missing_rows)
        return concatenate(
            [await self._request_rows(first_part, schedule, read_cache=False), block]
        )

    async def _request_rows(
        self, query: ScoreQuery, schedule: QuerySchedule, *, read_cache: bool
    ) -> RowBlock:
        """Send one request to vLLM and return the last rows of `query`.

        Rows that need the hidden state of a cached token are missing at the beginning. Raises the
        DistillError of the query.
        """
        # The last token is left out, because it predicts nothing.
        prompt = query.token_ids[:-1].tolist()
        fields = {**encode_query(query), PACE: (schedule.step_tokens, schedule.single)}
        encoded_answer = await self._vllm.pool(
            prompt, fields, schedule.number, read_cache=read_cache, adapter=query.adapter
        )
        answer = decode_answer(encoded_answer)
        if isinstance(answer, DistillError):
            raise answer
        if query.head_ids is not None:
            answer = replace(answer, head_ids=query.head_ids[-len(answer) :])
        return answer

    def _load_adapter(self, adapter: Adapter, number: int) -> None:
        """Load an adapter into vLLM's processes. Raises InvalidInput if it fits another model."""
        try:
            self._vllm.add_adapter(adapter.name, number, adapter.path)
        except Exception as error:  # vLLM has no class of its own for this error
            self._vllm.close()
            raise InvalidInput(
                f"vLLM cannot use the adapter {adapter.path}: {' '.join(str(error).split())[:300]}",
                field=OPTION,
                hint="give an adapter of this model, or merge the adapter and serve the merged"
                " model",
            ) from error

    def _describe(
        self,
        model: str,
        path: Path,
        head: HeadTensors,
        tokens: tuple[str, ...],
        digests: FileDigests,
        extra_options: Mapping[str, Any],
    ) -> ScoringEngineInfo:
        config = self._vllm.config
        dtype = str(config.model_config.dtype).removeprefix("torch.")
        facts = {
            **file_facts(path, digests),
            "tokenizer": tokenizer_fingerprint(tokens),
            "dtype": dtype,
            "engine": "vllm",
            "device": config.device_config.device_type,
            "attention": self._vllm.call_worker("attention_backends"),
            "kv_cache": config.cache_config.cache_dtype,
            "prefix_caching": config.cache_config.enable_prefix_caching,
            "vllm": release_of(self._vllm.version),
            "torch": release_of(torch.__version__),
            **select_changing_options(extra_options),
        }
        return ScoringEngineInfo(
            model=model,
            fingerprint=compute_fingerprint(facts),
            tokenizer_fingerprint=tokenizer_fingerprint(tokens),
            vocabulary=tokens,
            vocab_size=head.vocab_size,
            max_length=config.model_config.max_model_len,
            dtype=dtype,
            name="vllm",
            batch_invariant=False,
            chat_template=default_template_in(path),
        )


def _build_arguments(
    path: Path, skeleton: Any, head: HeadTensors, max_batch_tokens: int
) -> dict[str, Any]:
    """Return arguments of vLLM's AsyncEngineArgs for a model and its head."""
    arguments: dict[str, Any] = {
        "model": str(path),
        "dtype": str(skeleton.dtype).removeprefix("torch."),
        "max_num_batched_tokens": max_batch_tokens,
        "max_num_seqs": min(256, max_batch_tokens),
        "scheduling_policy": "priority",
        "scheduler_cls": _SCHEDULER,
        "async_scheduling": False,  # as vLLM does for pooling; the scheduler requires it
        "long_prefill_token_threshold": _compute_prefill_threshold(skeleton, max_batch_tokens),
        "long_prefill_token_threshold_adaptive": True,
        "worker_cls": _WORKER,
        # By default vLLM accepts a quantised model that lacks some of its weights.
        "model_loader_extra_config": {"enable_weights_track": True},
        "additional_config": {
            "head": [head.weight.weight, head.weight.scales, head.bias],
            "scale_and_cap": [head.scale_and_cap.scale, head.scale_and_cap.cap],
            "vocab_size": head.vocab_size,
            "teacher_pid": os.getpid(),
        },
    }
    if head.weight.scales is not None:
        arguments["hf_overrides"] = _exclude_head(path)
    return arguments


def _build_lora_options(adapters: Sequence[Adapter]) -> dict[str, Any]:
    if not adapters:
        return {}
    rank = max(adapter.rank for adapter in adapters)
    if rank > _LORA_RANKS[-1]:
        raise InvalidInput(
            f"vLLM has adapters of at most rank {_LORA_RANKS[-1]}, not {rank}",
            field=OPTION,
            hint="merge the adapter and serve the merged model",
        )
    return {
        "enable_lora": True,
        # On a CPU, vLLM uses the last adapter slot (index -1) for requests without an adapter, so
        # there is one more slot, which stays empty.
        "max_loras": len(adapters) + (not torch.cuda.is_available()),
        "max_lora_rank": next(size for size in _LORA_RANKS if size >= rank),
        # These layers do not include the head, because the scoring head replaces vLLM's head.
        "lora_target_modules": sorted(frozenset().union(*(adapter.layers for adapter in adapters))),
    }


def _compute_prefill_threshold(skeleton: Any, step_tokens: int) -> int:
    """Return the number of tokens per step that a long query gets, however many queries wait.

    The number is a minimum: vLLM raises it to an equal share of the step. vLLM rejects a number
    above the longest context. Only vLLM knows the longest context exactly, but nearly all models
    have more than 2,048 tokens.
    """
    return min(max(1, step_tokens // 4), 2048, max_length_of(skeleton))


def _exclude_head(path: Path) -> dict[str, Any]:
    """Return the config overrides that keep vLLM from building a quantised head.

    The scoring head replaces vLLM's head, and some platforms have no kernel for a quantised head.
    """
    quantisation = dict(quantisation_of(path, "--model") or {})
    if quantisation.get("quant_method") == "compressed-tensors":
        quantisation["ignore"] = [*(quantisation.get("ignore") or []), "re:.*lm_head"]
    return {"quantization_config": quantisation}


def _startup_error(path: Path, reason: str) -> InvalidInput:
    # Strip what pydantic puts around the message of an option error.
    reason = reason.partition("Value error, ")[2].partition(" [type=")[0] or reason
    reason = " ".join(reason.split())[:300]
    return InvalidInput(
        f"vLLM does not start with {path}: {reason}",
        field="--model",
        hint="read vLLM's log above; for memory, set --gpu-memory-share or --tensor-parallel-size",
    )

"""Starts vLLM for the vllm rollout engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from clients.data.models.shape import rope_switch
from protos.errors import InvalidInput
from protos.vllm_processes import executor, set_environment, stdout_on_stderr

_WORKER = "student_trainer.rollout_service.engines.vllm_worker.RolloutWorker"
# vLLM's sizes of the memory for adapters, by largest rank.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class Adapters:
    """The student's adapters (LoRA).

    - rank: their rank.
    - layers: the last part of the name of each layer that has an adapter.
    """

    rank: int
    layers: Sequence[str]


def start_vllm(
    model: str,
    *,
    dtype: str,
    adapters: Adapters | None,
    tensor_parallel_size: int,
    gpu_memory_share: float,
    max_batch_tokens: int,
    sleeps: bool,
) -> Any:
    """Start vLLM's processes with the worker of this package, and return the AsyncLLM.

    The weights are random until the first load. With adapters, the base weights come from the files
    of `model` and do not change. Logits are float32, also for a bfloat16 model, because bfloat16
    rounds logits between 8 and 16 to multiples of 1/16.

    `sleeps`: allocate the memory in such a way that it can be freed and allocated again; needs a
    GPU.

    Raises InvalidInput if vLLM does not start.
    """
    set_environment()
    # Select the model runner whose sampler can be replaced.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    from transformers import AutoConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=model,
        dtype=dtype,
        tensor_parallel_size=tensor_parallel_size,
        gpu_memory_utilization=gpu_memory_share,
        max_num_batched_tokens=max_batch_tokens,
        max_num_seqs=min(256, max_batch_tokens),
        worker_cls=_WORKER,
        distributed_executor_backend=executor(tensor_parallel_size),
        additional_config={"service_pid": os.getpid()},
        # With a length, vLLM uses the short rotary factors of LongRoPE, as the trainer does. With
        # -1, vLLM uses the longest context that fits in memory, at most the model's own maximum.
        max_model_len=rope_switch(AutoConfig.from_pretrained(model).get_text_config()) or -1,
        skip_tokenizer_init=True,
        trust_remote_code=False,
        load_format="auto" if adapters else "dummy",
        hf_overrides={"head_dtype": "float32"},
        disable_log_stats=True,
        enable_prefix_caching=True,
        enable_sleep_mode=sleeps,
        generation_config="vllm",  # ignore the model's own generation settings
        # On a CPU, a compiled model would keep the weights that it was compiled with.
        enforce_eager=not torch.cuda.is_available(),
        **(_lora_options(adapters) if adapters else {}),
    )
    # Ctrl-C reaches every process of the terminal, but vLLM must run until the last sequence is
    # sent. vLLM's processes inherit the signal mask of this thread, and so ignore SIGINT.
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with stdout_on_stderr():
            return AsyncLLM.from_engine_args(arguments)
    except (ValueError, RuntimeError) as error:
        raise _build_start_error(model, error) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def _lora_options(adapters: Adapters) -> dict[str, Any]:
    if adapters.rank > _LORA_RANKS[-1]:
        raise InvalidInput(
            f"vLLM has adapters of at most rank {_LORA_RANKS[-1]}, not {adapters.rank}",
            field="--lora-rank",
            hint="remove the option: adapters are then merged before the weights are sent",
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(size for size in _LORA_RANKS if size >= adapters.rank),
        # Without the head, which has no adapter: vLLM would fail to score several probes at once.
        "lora_target_modules": [*adapters.layers],
    }


def _build_start_error(model: str, error: Exception) -> InvalidInput:
    reason = " ".join(str(error).split())[:300]
    return InvalidInput(
        f"vLLM does not start with {model}: {reason}",
        field="--model",
        hint="read vLLM's log above; for memory, set --gpu-memory-share or --tensor-parallel-size",
    )

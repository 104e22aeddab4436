"""Sampling by peers: vLLM with its own sampler, and transformers' generate."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protos.vllm_processes import set_environment, stdout_on_stderr


def start_vllm(path: Path, *, batch_tokens: int, share: float) -> Any:
    """Start vLLM with random weights and its own sampler; return the AsyncLLM."""
    set_environment()
    if torch.cuda.is_available():
        os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)  # its own choice
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=str(path),
        dtype="bfloat16",
        load_format="dummy",
        gpu_memory_utilization=share,
        max_num_batched_tokens=batch_tokens,
        max_num_seqs=min(256, batch_tokens),
        skip_tokenizer_init=True,
        disable_log_stats=True,
        generation_config="vllm",
        enforce_eager=not torch.cuda.is_available(),
    )
    with stdout_on_stderr():
        return AsyncLLM.from_engine_args(arguments)


async def sample_with_vllm(llm: Any, prompts: Sequence[Tensor], max_tokens: int) -> int:
    """Sample `max_tokens` tokens after each prompt with vLLM's own sampler; return their number."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )

    async def sample_one(number: int, ids: Tensor) -> int:
        name = f"{time.monotonic_ns()}-{number}"
        async for output in llm.generate(tokens_input(ids.tolist()), params, name):
            completion = output.outputs[0]
        return len(completion.token_ids)

    tasks = (sample_one(number, ids) for number, ids in enumerate(prompts))
    return sum(await asyncio.gather(*tasks))


@torch.no_grad()
def sample_with_generate(model: Any, prompts: Sequence[Tensor], max_tokens: int) -> int:
    """Sample as `sample_with_vllm` does, in one batch with transformers' generate."""
    ids = torch.stack([*prompts]).to(model.device)
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        pad_token_id=0,
    )
    return int(output[:, ids.shape[1] :].numel())

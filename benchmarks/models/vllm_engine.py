"""The vLLM engine against vLLM's own prompt_logprobs, and against a head outside the worker.

    .venv-vllm/bin/python -m benchmarks.models.vllm_engine [--quick] [--out FILE]

One small model per vocabulary, the same sequences, k = 64, one thread, all rows of all positions.
All methods are started, then take turns. The result is the wall time of the best turn, from token
ids to numbers in this process. The rows are compared, too. "prompt_logprobs" is a call without
further options, which makes one object per candidate with its text. "flat" is vLLM's
output with the fewest objects: FlatLogprobs without text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from clients.teacher.query import ScoreQuery
from protos.rows.codec import RowBlock
from teacher_service.engines.vllm import VllmEngine
from teacher_service.engines.vllm_process import VllmProcess
from teacher_service.engines.vllm_worker import cpu_product
from teacher_service.head.head import Head
from teacher_service.models.loading import load_model
from tests.vllm.model import save_model

HEAD = 64
STEP_TOKENS = 4096
# The body's cost is small against the head's at a vocabulary of 65,536, and large at 8,192.
SIZES = {"hidden_size": 256, "layers": 6}

Rows = list[tuple[np.ndarray, np.ndarray]]  # head ids and log-probs [rows, k] of each sequence
Method = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few sequences, one turn, for tests")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/vllm_engine.json"))
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    torch.set_num_threads(1)
    count, length, turns = (4, 64, 1) if options.quick else (16, 256, 5)
    result = {
        "machine": f"{platform.machine()}, torch {torch.__version__}, 1 thread",
        "workload": {"sequences": count, "tokens": length, "k": HEAD, "turns": turns},
        "vocabularies": {
            str(vocab): compare(vocab, count, length, turns) for vocab in (8_192, 65_536)
        },
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print_results(result)


def compare(vocab: int, count: int, length: int, turns: int) -> dict[str, Any]:
    ids = np.random.default_rng(0).integers(0, vocab, (count, length)).astype(np.int32)
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder), vocab_size=vocab, **SIZES)
        save_tokenizer(path, vocab)
        methods, close = start_methods(path, ids)
        seconds, answers = take_turns(methods, turns)
        version = close()
    tokens = count * (length - 1)
    base, lean = min(seconds["prompt_logprobs"]), min(seconds["prompt_logprobs, flat"])
    return {
        "vllm": version,
        "methods": {
            name: {
                "tokens_per_second": tokens / min(times),
                "spread": max(times) / min(times),
                "median_seconds": statistics.median(times),
                "of_prompt_logprobs": base / min(times),
                "of_flat": lean / min(times),
            }
            for name, times in seconds.items()
        },
        "same_top_k": compare_rows(
            rows_of_blocks(answers["ours"]), rows_of_flat(answers["prompt_logprobs, flat"])
        ),
    }


def save_tokenizer(path: Path, vocab: int) -> None:
    """Save a tokenizer with one word per id."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(path)


def start_methods(path: Path, ids: np.ndarray) -> tuple[dict[str, Method], Callable[[], str]]:
    """Start every method on the model in `path`; return them and a function that stops them."""
    engine = VllmEngine(str(path), max_batch_tokens=STEP_TOKENS)
    pooling_process = VllmProcess(
        {"model": str(path), "dtype": "float32", "max_num_batched_tokens": STEP_TOKENS}
    )
    weight = load_model(path, dtype="auto").get_output_embeddings().weight.detach()
    head = Head(weight, None, cpu_product(weight))
    queries = [ScoreQuery(row, 1, top_k=HEAD, f32=True) for row in ids]
    generate = start_generate(path)

    def close() -> str:
        engine.close()
        pooling_process.close()
        return pooling_process.version

    methods = {
        "ours": lambda: engine.score(queries),
        "head outside the worker": lambda: score_outside(pooling_process, head, queries),
        "prompt_logprobs, flat": lambda: generate(ids, flat=True),
        "prompt_logprobs": lambda: generate(ids, flat=False),
    }
    return methods, close


@torch.inference_mode()
def score_outside(vllm: VllmProcess, head: Head, queries: Sequence[ScoreQuery]) -> object:
    """Score with the head in this process; vLLM sends hidden states, one tensor per sequence."""

    async def pool() -> list[torch.Tensor]:
        prompts = [query.token_ids[:-1].tolist() for query in queries]
        return await asyncio.gather(*(vllm.pool(p, {}, 0, read_cache=False) for p in prompts))

    return head.score(queries, vllm.run(pool()))


def start_generate(path: Path) -> Callable[..., list[Any]]:
    """Start vLLM's generation runner with the same limits."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(path),
        dtype="float32",
        max_logprobs=HEAD,
        max_num_batched_tokens=STEP_TOKENS,
        enforce_eager=True,
        disable_log_stats=True,
    )

    def generate(ids: np.ndarray, *, flat: bool) -> list[Any]:
        params = SamplingParams(
            max_tokens=1, prompt_logprobs=HEAD, flat_logprobs=flat, detokenize=not flat
        )
        prompts = [{"prompt_token_ids": row.tolist()} for row in ids]
        return [o.prompt_logprobs for o in llm.generate(prompts, params, use_tqdm=False)]

    return generate


def take_turns(
    methods: dict[str, Method], turns: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return the seconds of each turn by method, after a warm-up turn, and the last results."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    answers = {}
    for turn in range(turns + 1):
        for name, method in methods.items():
            began = time.perf_counter()
            answers[name] = method()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds, answers


def rows_of_blocks(blocks: Sequence[RowBlock]) -> Rows:
    return [(block.head_ids, block.head_logprobs) for block in blocks]


def rows_of_flat(answers: Sequence[Any]) -> Rows:
    """Return ids and log-probs without the first position, which has no row.

    The actual token, which vLLM lists first at each position, is left out, too.
    """
    rows = []
    for flat in answers:
        shape = (len(flat.start_indices) - 1, HEAD + 1)
        first = flat.start_indices[1]
        ids = np.array(flat.token_ids[first:]).reshape(shape)[:, 1:]
        rows.append((ids, np.array(flat.logprobs[first:]).reshape(shape)[:, 1:]))
    return rows


def compare_rows(rows: Rows, expected_rows: Rows) -> dict[str, float]:
    """Compare two sets of rows.

    Returns the share of positions with the same ids in the same order, and the largest difference
    of a log-prob at these positions.
    """
    is_same = np.concatenate(
        [(a[0] == b[0]).all(1) for a, b in zip(rows, expected_rows, strict=True)]
    )
    differences = np.concatenate(
        [np.abs(a[1] - b[1]).max(1) for a, b in zip(rows, expected_rows, strict=True)]
    )
    return {
        "positions": float(is_same.mean()),
        "largest_difference": float(differences[is_same].max()),
    }


def print_results(result: dict[str, Any]) -> None:
    print(f"{result['workload']}; {result['machine']}")
    for vocab, results in result["vocabularies"].items():
        print(f"\nV = {vocab}, vLLM {results['vllm']}")
        print(
            f"{'method':<26}{'tokens/s':>10}{'of prompt_logprobs':>20}{'of flat':>9}{'spread':>8}"
        )
        for name, row in results["methods"].items():
            speed, spread = row["tokens_per_second"], row["spread"]
            ratios = f"{row['of_prompt_logprobs']:>20.2f}{row['of_flat']:>9.2f}"
            print(f"{name:<26}{speed:>10.0f}{ratios}{spread:>8.2f}")
        agreement = results["same_top_k"]
        print(
            f"same top-{HEAD} ids as prompt_logprobs: {agreement['positions']:.2%} of the"
            f" positions, largest difference {agreement['largest_difference']:.1e} nats"
        )


if __name__ == "__main__":
    main()

"""The time of draws: the fused loss, and a decode step of the sampler, at 151,936 ids.

    python -m benchmarks.draws.speed [--rows 512] [--repetitions 7]

writes benchmarks/results/draw_speed.json. The two sides of a comparison alternate, and a figure is
the median of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from student_trainer.losses import Rows, fused_linear_loss, rows_from_logits, topk_kl
from student_trainer.rollouts.sampler import Sampler, rollout_noise

VOCABULARY, WIDTH = 151_936, 896


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/draw_speed.json"))
    options = parser.parse_args(arguments)
    loss = compare(
        make_fused_step(options.rows, 64, 0),
        make_fused_step(options.rows, 8, 16),
        options.repetitions,
    )
    decode = compare(*make_sampling_step(options.layers), options.repetitions)
    result = {
        "threads": torch.get_num_threads(),
        "fused loss: k = 8, M = 16 against k = 64, M = 0": loss,
        "decode step: M = 16 against M = 0": decode,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def compare(
    base: Callable[[], Any], alternative: Callable[[], Any], repetitions: int
) -> dict[str, float]:
    """Return the median seconds of `base`, and the ratio of `alternative`: median and range."""
    base_seconds: list[float] = []
    ratios = []
    base(), alternative()
    for number in range(repetitions):
        pair = [base, alternative] if number % 2 else [alternative, base]
        seconds = {run: _time_run(run) for run in pair}
        base_seconds.append(seconds[base])
        ratios.append(seconds[alternative] / seconds[base])
    return {
        "seconds": statistics.median(base_seconds),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }


def _time_run(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def make_fused_step(count: int, k: int, draws: int) -> Callable[[], None]:
    """Return a forward and backward pass of the fused loss with k head ids and M draws."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, WIDTH, generator=generator).requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH, generator=generator) * 2 / WIDTH**0.5).requires_grad_()
    with torch.no_grad():
        logits = hidden @ weight.T
        head = logits.topk(k).indices
        tokens = torch.randint(VOCABULARY, (count,), generator=generator)
        ids = torch.randint(VOCABULARY, (count, draws), generator=generator) if draws else None
        teacher = rows_from_logits(logits * 0.9, head, tokens, sample_ids=ids)
    in_head = (head == tokens[:, None]).any(1)

    def loss(rows: Rows, index: slice) -> torch.Tensor:
        return topk_kl(
            rows, teacher[index], in_head[index], direction="reverse",
            tail="bucket+draws" if draws else "bucket+sampled",
        )  # fmt: skip

    def run() -> None:
        hidden.grad = weight.grad = None
        fused_linear_loss(hidden, weight, head, tokens, loss, sample_ids=ids).loss_sum.backward()

    return run


def make_sampling_step(
    layers: int, batch: int = 8, tokens: int = 8
) -> tuple[Callable[[], None], ...]:
    """Return two runs of `tokens` decode steps without draws and with 16, of a 0.5B model."""
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=4864, num_hidden_layers=layers,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    prompts = [torch.randint(VOCABULARY, (16,)) for _ in range(batch)]
    noise = [rollout_noise(number, 0, tokens) for number in range(batch)]

    def run(draws: int) -> Callable[[], None]:
        sampler = Sampler(model, _NoEnd(), top_k=8, temperature=1.0, draws=draws)

        def write() -> None:
            sampler.write(prompts, [tokens] * batch, noise, draw_noise=noise if draws else None)

        return write

    return run(0), run(16)


class _NoEnd:
    """A tokenizer without end token: every answer has the full length."""

    eos_token_id = None
    pad_token_id = 0


if __name__ == "__main__":
    main()

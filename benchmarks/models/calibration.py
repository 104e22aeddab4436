"""Measures the figures of one core of a CPU that the step-time model needs, in a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.models.memory_plan import Ends
from clients.plan.machines import MachineFigures
from student_trainer.rollouts.sampler import Sampler

REPETITIONS = 7
# A product as in a layer of a student, and weights that exceed the caches.
TOKENS, WIDTH, INNER, COLD_MATRICES = 1024, 512, 1536, 48
HEADS, HEAD_WIDTH, LINE = 4, 64, 256
# Figures that two calibrations average; the others are 1, or equal to one of these.
RATES = (
    "bf16", "float32", "memory", "host", "attention_share", "elementwise_share", "layer_launch",
    "token_launch",
)  # fmt: skip


def fastest_seconds(run: Callable[[], Any], repetitions: int = REPETITIONS) -> float:
    """Return the fewest processor seconds of this thread, after one run to warm up."""
    run()
    seconds = []
    for _ in range(repetitions):
        started = time.thread_time()
        run()
        seconds.append(time.thread_time() - started)
    return min(seconds)


@torch.no_grad()
def measure_products() -> float:
    """Return the operations per second of a matrix product."""
    states, weight = torch.randn(TOKENS, WIDTH), torch.randn(INNER, WIDTH)
    return 2 * TOKENS * WIDTH * INNER / fastest_seconds(lambda: linear(states, weight))


def measure_attention() -> float:
    """Return the operations per second of causal attention, forward and backward.

    As in the formulas, the forward pass counts half of the scores, the backward pass 2.5 times as
    many operations.
    """
    shape = (TOKENS // LINE, HEADS, LINE, HEAD_WIDTH)
    queries, keys, values, gradient = (torch.randn(shape, requires_grad=True) for _ in range(4))

    def run() -> None:
        output = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        torch.autograd.grad(output, (queries, keys, values), gradient)

    return 3.5 * 2 * TOKENS * HEADS * HEAD_WIDTH * LINE / fastest_seconds(run)


@torch.no_grad()
def measure_reads(products: float) -> float:
    """Return the bytes per second of weights that products of a few rows read from memory."""
    rows, weights = 8, [torch.randn(INNER, WIDTH) for _ in range(COLD_MATRICES)]
    states = torch.randn(rows, WIDTH)
    count = COLD_MATRICES * WIDTH * INNER
    seconds = fastest_seconds(lambda: [linear(states, weight) for weight in weights])
    return 4 * count / (seconds - 2 * rows * count / products)


def measure_traffic() -> float:
    """Return the bytes per second of the SwiGLU of a layer, forward and backward."""
    gate, up = (torch.randn(TOKENS, INNER, requires_grad=True) for _ in range(2))

    def run() -> None:
        torch.autograd.grad((silu(gate) * up).sum(), (gate, up))

    # silu 2, product 3, sum 1; backward: product 4 (the gradient of the sum is one number), silu 3.
    return 4 * 13 * gate.numel() / fastest_seconds(run)


def measure_launches() -> tuple[float, float]:
    """Return the seconds of a layer of a decoding step without arithmetic, and of the rest."""
    one, nine = (measure_token(layers) for layers in (1, 9))
    layer = (nine - one) / 8
    return layer, one - layer


def measure_token(layers: int, tokens: int = 24) -> float:
    """Return the seconds of a decoding step of a model of this number of layers."""
    sampler = Sampler(tiny_model(layers), Ends(), top_k=16, temperature=1.0, draws=48)
    before = [torch.arange(4)]
    noise, draw_noise = ([torch.rand(tokens, dtype=torch.float64)] for _ in range(2))
    seconds = fastest_seconds(
        lambda: sampler.write(before, [tokens], noise, draw_noise=draw_noise), 5
    )
    return seconds / tokens


def tiny_model(layers: int) -> Any:
    """Return a model whose forward pass takes hardly more time than its launches."""
    config = Qwen3Config(
        vocab_size=1025,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return Qwen3ForCausalLM(config).eval()


def measure_copy() -> float:
    """Return the bytes per second of a copy that exceeds the caches."""
    source = torch.randn(1 << 24)
    target = torch.empty_like(source)
    return 8 * len(source) / fastest_seconds(lambda: target.copy_(source))


def calibrate() -> MachineFigures:
    """Return the figures of one core. They are rates that programs reach, so no share applies."""
    products = measure_products()
    reads = measure_reads(products)
    layer, token = measure_launches()
    copy = measure_copy()
    return MachineFigures(
        products, products, reads, 16, copy, copy, copy,
        attention_share=measure_attention() / products,
        product_share=1.0, memory_share=1.0, link_share=1.0,
        elementwise_share=measure_traffic() / reads,
        layer_launch=layer, token_launch=token, engine_launch=token, overlaps=False,
    )  # fmt: skip


def mean_figures(first: MachineFigures, second: MachineFigures) -> MachineFigures:
    """Return the geometric means of two calibrations."""
    return replace(
        first,
        **{
            field.name: (getattr(first, field.name) * getattr(second, field.name)) ** 0.5
            for field in fields(first)
            if field.name in RATES
        },
    )

"""Compares the throughput of a `distill-teacher` process with that of its engine alone."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery
from teacher_service.engines.hf import HfEngine

# About 2% of the FLOPs per token of a 0.6B model. A smaller model makes the overhead more visible.
WIDTH, LAYERS, VOCAB = 256, 4, 32_768
LENGTH, HEAD, BATCH = 512, 64, 8


def compare_with_service(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Return tokens per second of both: medians over repetitions, in turns, same sequences."""
    save_model(folder)
    engine = HfEngine(str(folder))
    count, repetitions = (BATCH, 1) if quick else (4 * BATCH, 5)
    seconds: dict[str, list[float]] = {"engine": [], "service": []}
    command = [sys.executable, "-m", "teacher_service", "--model", str(folder), "--port", "0"]
    command += ["--no-cache", "--max-batch-tokens", str(BATCH * LENGTH)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as teacher:
        assert teacher.stdout
        address = teacher.stdout.readline().split()[-1]
        with TeacherClient(address) as client:
            for repetition in range(repetitions + 1):  # the first round warms up
                queries = random_queries(count, repetition)
                began = time.perf_counter()
                for first in range(0, count, BATCH):
                    engine.score(queries[first : first + BATCH])
                seconds["engine"].append(time.perf_counter() - began)
                began = time.perf_counter()
                for answer in [client.submit(query) for query in queries]:
                    answer.result()
                seconds["service"].append(time.perf_counter() - began)
        teacher.terminate()
    pairs = list(zip(seconds["engine"], seconds["service"], strict=True))[1:]
    tokens = count * (LENGTH - 1)
    return {
        "model": f"Qwen3 of {LAYERS} layers, H = {WIDTH}, V = {VOCAB}, random weights, float32",
        "tokens": tokens,
        "length": LENGTH,
        "engine": tokens / statistics.median(engine_seconds for engine_seconds, _ in pairs),
        "service": tokens / statistics.median(service_seconds for _, service_seconds in pairs),
        "ratio": statistics.median(
            engine_seconds / service_seconds for engine_seconds, service_seconds in pairs
        ),
    }


def random_queries(count: int, seed: int) -> list[ScoreQuery]:
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (count, LENGTH)).astype(np.int32)
    return [ScoreQuery(row, 1, top_k=HEAD) for row in tokens]


def save_model(folder: Path) -> None:
    """Save a random model, and a tokenizer with as many words as the model has logits."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=WIDTH // 4,
        max_position_embeddings=LENGTH,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = {f"w{number}": number for number in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)

"""Compares stores of rows: size, and the speed of writing and reading.

    python -m benchmarks.wire.cache [--quick] [--out benchmarks/results/cache.json]

Sequences of 1,024 tokens are written and read in random order, all stores in turn. Times are the
median wall time on one thread, with the spread. The page cache holds every file, so no read is
cold. The rows are those of a small trained model: vocabulary 151,936, k = 64 (k = 128 in
DistillKit's layout, as it recommends). Only ratios are comparable between machines.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from benchmarks.shared.model_rows import VOCAB, model_rows
from benchmarks.shared.redis_process import redis_server
from benchmarks.wire.cache_stores import (
    BATCH,
    Arrays,
    ArrowStore,
    DatasetsStore,
    DistillKitStore,
    MemmapBound,
    ParquetStore,
    RedisBound,
    RedisStore,
    RowStore,
    SafetensorsStore,
)
from benchmarks.wire.distillkit_layout import BUDGET, RECOMMENDED, Layout, compress, decompress
from protos.rows.codec import RowBlock, compress_rows, decode_rows, encode_rows

HEAD = 64
LENGTH = 1024
_MAX_BYTES = 1 << 30  # of the rows of a sequence
SLOW = ("Parquet, zstd", "datasets, nested lists", "DistillKit's layout, datasets")
OURS = "ours, Arrow"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, for tests")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cache.json"))
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    datasets.disable_progress_bars()
    rows = model_rows()
    sequences, repetitions = (16, 2) if options.quick else (192, 7)
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "vocabulary": VOCAB,
        "stores": measure_stores(rows, sequences, repetitions),
        "precision": measure_precision(rows),
    }
    result["targets"] = check_targets(result)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print_results(result)


def head_of(rows: RowBlock, k: int) -> RowBlock:
    """Return the rows reduced to the k likeliest ids; the mass of the other ids joins the tail."""
    assert rows.head_ids is not None
    outside_logmass = np.logaddexp.reduce(rows.head_logprobs[:, k:], axis=1, initial=-np.inf)
    tail = np.logaddexp(rows.tail_logmass, outside_logmass).astype(np.float32)
    return RowBlock(rows.head_ids[:, :k], rows.head_logprobs[:, :k], tail, rows.token_logprobs)


@contextmanager
def open_stores() -> Iterator[dict[str, RowStore]]:
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as port:
        path = Path(folder)
        redises = {
            "ours, Redis": RedisStore(f"127.0.0.1:{port}", loop, zstd=False),
            "ours, Redis, zstd": RedisStore(f"127.0.0.1:{port}", loop, zstd=True),
            "bound: Redis MGET": RedisBound(port),
        }
        yield {
            "bound: numpy.memmap": MemmapBound(path / "memmap"),
            OURS: ArrowStore(path / "arrow", zstd=False),
            "ours, Arrow, zstd": ArrowStore(path / "arrow-zstd", zstd=True),
            **redises,
            "safetensors": SafetensorsStore(path / "safetensors"),
            "Parquet, zstd": ParquetStore(path / "parquet"),
            "datasets, nested lists": DatasetsStore(path / "datasets"),
            "DistillKit's layout, datasets": DistillKitStore(path / "distillkit"),
        }
        for store in redises.values():
            store.close()
    loop.close()


def measure_stores(rows: RowBlock, sequences: int, repetitions: int) -> dict[str, dict[str, float]]:
    """Measure bytes per token, and tokens per second written and read in random order, by store."""
    parts = [rows.slice(first, first + LENGTH) for first in range(0, len(rows), LENGTH)]
    results: dict[str, dict[str, float]] = {}
    with open_stores() as all_stores:
        blocks: dict[str, list[RowBlock]] = {}
        for name, store in all_stores.items():
            k = RECOMMENDED.k if "DistillKit" in name else HEAD
            # Slow stores get fewer repetitions: they would take most of the time.
            count = max(4, sequences // 16) if name in SLOW else sequences
            blocks[name] = [head_of(parts[i % len(parts)], k) for i in range(count)]
            began = time.perf_counter()
            size = store.write(blocks[name])
            seconds = time.perf_counter() - began
            tokens = LENGTH * count
            results[name] = {"bytes": size / tokens, "write": tokens / seconds}
            for first in range(0, count, BATCH):
                numbers = range(first, min(first + BATCH, count))
                require_equal(name, [blocks[name][i] for i in numbers], store.read(numbers))
        rates: dict[str, list[float]] = {name: [] for name in all_stores}
        random = np.random.default_rng(0)
        for _ in range(repetitions):
            for name, store in all_stores.items():
                order = random.permutation(len(blocks[name])).tolist()
                began = time.perf_counter()
                for first in range(0, len(order), BATCH):
                    store.read(order[first : first + BATCH])
                rates[name].append(LENGTH * len(order) / (time.perf_counter() - began))
    for name, found_rates in rates.items():
        results[name] |= {
            "read": statistics.median(found_rates),
            "spread": max(found_rates) / min(found_rates),
        }
    return results


def require_equal(name: str, blocks: list[RowBlock], stored_arrays: list[Arrays]) -> None:
    """Check that a store lost nothing: equal ids, log-probs to f16 (except DistillKit's)."""
    for block, (ids, logprobs) in zip(blocks, stored_arrays, strict=True):
        np.testing.assert_array_equal(ids, block.head_ids, err_msg=name)
        if "DistillKit" not in name:
            np.testing.assert_allclose(logprobs, block.head_logprobs, rtol=1e-3, err_msg=name)


def measure_precision(rows: RowBlock) -> dict[str, dict[str, float]]:
    """Measure each encoding of the head: bytes per token, error of the KL, and time to decode.

    The error is |sum_i p_i (log p_i - log p'_i)| in nats, averaged over rows: the error of a
    forward KL over the head, with p the model's probabilities and p' the decoded ones.
    """
    results = {}
    for name, layout in (("DistillKit, k = 128", RECOMMENDED), ("DistillKit, k = 50", BUDGET)):
        results[name] = measure_layout(layout, rows.slice(0, LENGTH))
    for k in (32, 50, 64, 128):
        results[f"ours, zstd, k = {k}"] = measure_codec(head_of(rows.slice(0, LENGTH), k))
    return results


def measure_layout(layout: Layout, rows: RowBlock) -> dict[str, float]:
    block = head_of(rows, layout.k)
    assert block.head_ids is not None
    values, packed = compress(layout, block.head_ids, block.head_logprobs)
    _, decoded = decompress(layout, values, packed)
    return {
        "bytes": values.shape[1] + packed.shape[1],
        "error": head_error(block.head_logprobs, decoded),
        "decode_us": decode_microseconds(lambda: decompress(layout, values, packed)),
    }


def measure_codec(block: RowBlock) -> dict[str, float]:
    data = compress_rows(encode_rows(block))
    return {
        "bytes": len(data) / len(block),
        "error": head_error(block.head_logprobs, decode_rows(data, _MAX_BYTES).head_logprobs),
        "decode_us": decode_microseconds(lambda: decode_rows(data, _MAX_BYTES)),
    }


def head_error(logprobs: Any, decoded: Any) -> float:
    exact = logprobs.astype(np.float64)
    return float(np.abs((np.exp(exact) * (exact - decoded)).sum(axis=1)).mean())


def decode_microseconds(run: Any, repetitions: int = 7) -> float:
    """Return the CPU time per token in microseconds, the minimum of several runs."""
    times = []
    for _ in range(repetitions):
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return min(times) * 1e6 / LENGTH


def check_targets(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the targets of the benchmark with the measured values."""
    read_rates = {name: store["read"] for name, store in result["stores"].items()}
    sizes = {name: store["bytes"] for name, store in result["stores"].items()}
    precision = result["precision"]
    peer_codec, own_codec = precision["DistillKit, k = 128"], precision["ours, zstd, k = 128"]
    slow = read_rates["datasets, nested lists"]
    aims = {
        "Arrow, tokens a second, at least 4 M": (read_rates[OURS], read_rates[OURS] >= 4e6),
        "Redis, tokens a second, at least 2 M": (
            read_rates["ours, Redis"],
            read_rates["ours, Redis"] >= 2e6,
        ),
        "Arrow over datasets, at least 100": (
            read_rates[OURS] / slow,
            read_rates[OURS] / slow >= 100,
        ),
        "Arrow over memmap, at least 0.25": (
            read_rates[OURS] / read_rates["bound: numpy.memmap"],
            read_rates[OURS] / read_rates["bound: numpy.memmap"] >= 0.25,
        ),
        "bytes a token, at most 284": (sizes[OURS], sizes[OURS] <= 284),
        "bytes a token with zstd, at most 200": (
            sizes["ours, Arrow, zstd"],
            sizes["ours, Arrow, zstd"] <= 200,
        ),
        "error of f16, at most 1e-4 nats": (own_codec["error"], own_codec["error"] <= 1e-4),
        "DistillKit's error over ours, at no more bytes": (
            peer_codec["error"] / own_codec["error"],
            peer_codec["error"] > own_codec["error"] and own_codec["bytes"] <= peer_codec["bytes"],
        ),
        "Arrow over DistillKit's layout in datasets, at least 100": (
            read_rates[OURS] / read_rates["DistillKit's layout, datasets"],
            read_rates[OURS] / read_rates["DistillKit's layout, datasets"] >= 100,
        ),
    }
    return {name: {"found": value, "met": bool(met)} for name, (value, met) in aims.items()}


def print_results(result: dict[str, Any]) -> None:
    print(f"V = {result['vocabulary']}, k = {HEAD}; {result['machine']}\n")
    print(f"{'store':<32}{'B/token':>9}{'write M/s':>11}{'read M/s':>10}{'spread':>8}")
    for name, store in result["stores"].items():
        print(
            f"{name:<32}{store['bytes']:>9.1f}{store['write'] / 1e6:>11.3f}"
            f"{store['read'] / 1e6:>10.3f}{store['spread']:>8.2f}"
        )
    print(f"\n{'codec':<32}{'B/token':>9}{'error, nats':>13}{'decode us':>11}")
    for name, codec in result["precision"].items():
        line = f"{codec['bytes']:>9.1f}{codec['error']:>13.2e}{codec['decode_us']:>11.3f}"
        print(f"{name:<32}{line}")
    print()
    for name, target in result["targets"].items():
        print(f"{'met ' if target['met'] else 'MISS'} {name}: {target['found']:.4g}")


if __name__ == "__main__":
    main()

"""The vLLM teacher under load: full steps, throughput, and a light client with a heavy one.

    .venv-vllm/bin/python -m benchmarks.models.continuous [--quick] [--out FILE]

A small random model in float32. Lengths are those of GSM8K's questions with their answers in the
tokens of SmolLM2; one sequence in 64 has 4,096 tokens. k = 64 head ids. The service is the real one
(gRPC, queue, encoding), in this process beside the engine; the clients are in another process. One
thread for vLLM's worker. The methods take turns.

    bare      all queries given to the engine at once: what vLLM itself packs into its steps
    feeder    the service, by 1, 8 and 64 clients: queries go to vLLM as soon as their tokens fit
    batches   the service, by 8 clients, with the queue of the transformers engine: a batch ends
              before the next one begins
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery
from protos import teacher_pb2_grpc
from protos.rpc.transport import SERVER_OPTIONS
from teacher_service.engines.vllm import VllmEngine
from teacher_service.metrics import TeacherMetrics
from teacher_service.serving.batcher import Batcher
from teacher_service.serving.dispatcher import Dispatcher
from teacher_service.serving.feeder import Feeder
from teacher_service.serving.scorer import RowScorer
from teacher_service.serving.service import TeacherServicer
from teacher_service.serving.validation import RequestLimits
from teacher_service.serving.weights import WeightUpdater

# Tokens of a question and its answer: 32 quantiles of the 7,473 in GSM8K's train.jsonl.
# fmt: off
GSM8K = (
    87, 97, 105, 112, 117, 122, 128, 132, 137, 141, 146, 151, 156, 160, 165, 170,
    176, 181, 186, 193, 199, 206, 213, 220, 228, 237, 246, 260, 276, 294, 321, 372,
)
# fmt: on
LONG, ONE_IN = 4096, 64
HEAD, VOCAB = 64, 8192
SIZES = {"hidden_size": 256, "layers": 4}
HEAVY_DEPTH = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few queries, one turn, for tests")
    parser.add_argument("--step-tokens", type=int, default=4096, help="--max-batch-tokens")
    parser.add_argument("--queries", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/continuous.json"))
    parser.add_argument("--clients", nargs=3, help=argparse.SUPPRESS)  # ADDRESS CLIENTS QUERIES
    parser.add_argument("--light", nargs=3, help=argparse.SUPPRESS)  # ADDRESS QUERIES HEAVY
    options = parser.parse_args()
    if options.clients:
        address, clients, count = options.clients
        print(json.dumps(send_all(address, int(clients), int(count))))
        return
    if options.light:
        address, count, heavy = options.light
        print(json.dumps(send_light(address, int(count), heavy=heavy == "heavy")))
        return
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    count, light, turns = (64, 5, 1) if options.quick else (options.queries, 500, 3)
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load average "
        f"{os.getloadavg()[0]:.1f}",
        "workload": {
            "queries": count,
            "step_tokens": options.step_tokens,
            "turns": turns,
            "light": light,
        },
    }
    for part in measure(options.step_tokens, count, light, turns):
        result |= part
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print_results(result)


def measure(step_tokens: int, count: int, light: int, turns: int) -> Iterator[dict[str, Any]]:
    """Yield the results of the methods, then the latencies."""
    from benchmarks.models.vllm_engine import save_tokenizer
    from tests.vllm.model import save_model

    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder), vocab_size=VOCAB, max_length=2 * LONG, **SIZES)
        save_tokenizer(path, VOCAB)
        engine = VllmEngine(str(path), max_batch_tokens=step_tokens)
        queries = make_queries(count, seed=0)
        runs: dict[str, list[dict[str, float]]] = {}
        batcher = Batcher(engine, max_batch_tokens=step_tokens)
        with (
            serve_teacher(engine, Feeder(engine)) as feeder,
            serve_teacher(engine, batcher) as batches,
        ):
            methods: dict[str, Callable[[], float]] = {
                "bare": lambda: time_work(lambda: engine.score(queries)),
                **{
                    f"feeder, {n} clients": lambda n=n: run_clients(["--clients", feeder, n, count])
                    for n in (1, 8, 64)
                },
                "batches, 8 clients": lambda: run_clients(["--clients", batches, 8, count]),
            }
            for turn in range(turns + 1):
                for name, method in methods.items():
                    steps = engine.steps()
                    seconds = method()
                    steps, tokens = (b - a for a, b in zip(steps, engine.steps(), strict=True))
                    run = {"seconds": seconds, "steps": steps, "tokens": tokens}
                    if turn:  # the first turn warms up
                        runs.setdefault(name, []).append(run)
            yield {"methods": summarize_runs(runs)}
            latency = {
                "light alone": run_clients(["--light", feeder, light, "alone"]),
                "light beside heavy": run_clients(["--light", feeder, light, "heavy"]),
                # Each query takes seconds.
                "light beside heavy, batches": run_clients(
                    ["--light", batches, light // 25 + 5, "heavy"]
                ),
            }
            yield {"latency": latency}
        engine.close()


def summarize_runs(runs_by_method: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return medians over the turns, and ratios to the bare engine's."""
    rows = {}
    for name, runs in runs_by_method.items():
        ratios = [
            bare["seconds"] / run["seconds"]
            for bare, run in zip(runs_by_method["bare"], runs, strict=True)
        ]
        rows[name] = {
            "tokens_per_second": statistics.median(r["tokens"] / r["seconds"] for r in runs),
            "tokens_per_step": statistics.median(r["tokens"] / r["steps"] for r in runs),
            "of_bare_speed": statistics.median(ratios),
            "ratios": ratios,
        }
    for row in rows.values():
        row["of_bare_tokens_per_step"] = row["tokens_per_step"] / rows["bare"]["tokens_per_step"]
    return rows


def make_queries(count: int, *, seed: int) -> list[ScoreQuery]:
    rng = np.random.default_rng(seed)
    lengths = [
        LONG if number % ONE_IN == ONE_IN // 2 else int(rng.choice(GSM8K))
        for number in range(count)
    ]
    return [ScoreQuery(_random_tokens(rng, length), 1, top_k=HEAD) for length in lengths]


def _random_tokens(rng: np.random.Generator, length: int) -> np.ndarray[Any, Any]:
    return rng.integers(0, VOCAB, length).astype(np.int32)


def time_work(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextmanager
def serve_teacher(engine: VllmEngine, dispatcher: Dispatcher) -> Iterator[str]:
    """Serve the teacher in a thread, without a cache; yields its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    info = dispatcher.info

    async def start() -> tuple[grpc.aio.Server, int]:
        await dispatcher.__aenter__()
        limits = RequestLimits(info.vocab_size, info.max_length, HEAD)
        metrics = TeacherMetrics()
        weights = WeightUpdater(engine, dispatcher)
        scorer = RowScorer(dispatcher, None)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        servicer = TeacherServicer(scorer, dispatcher, weights, limits, metrics)
        teacher_pb2_grpc.add_TeacherServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    async def end(server: grpc.aio.Server) -> None:
        await server.stop(None)
        await dispatcher.__aexit__(None, None, None)

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(end(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def run_clients(arguments: list[Any]) -> Any:
    """Run clients in another process, and return what they print."""
    command = [sys.executable, "-m", "benchmarks.models.continuous", *map(str, arguments)]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(process.stdout.splitlines()[-1])


def send_all(address: str, clients: int, count: int) -> float:
    """Send the queries by a number of clients at the same time; return the seconds."""
    queries = make_queries(count, seed=0)
    opened = [TeacherClient(address) for _ in range(clients)]
    for client in opened:
        client.info()
    with ThreadPoolExecutor(clients) as pool:

        def send(number: int) -> None:
            futures = [opened[number].submit(query) for query in queries[number::clients]]
            for future in as_completed(futures):
                future.result()

        seconds = time_work(lambda: list(pool.map(send, range(clients))))
    for client in opened:
        client.close()
    return seconds


def send_light(address: str, count: int, *, heavy: bool) -> dict[str, float]:
    """Send queries one after the other; return the median and p99 of their seconds.

    heavy: with a second client that always has HEAVY_DEPTH queries in flight.
    """
    light_finished = threading.Event()
    rng = np.random.default_rng(2)
    seconds = []
    with TeacherClient(address) as light_client, TeacherClient(address) as heavy_client:

        def load() -> None:
            pending = [heavy_client.submit(query) for query in make_queries(HEAVY_DEPTH, seed=1)]
            for seed in range(2, 10**6):
                for query in make_queries(HEAVY_DEPTH, seed=seed):
                    pending.pop(0).result()
                    if light_finished.is_set():
                        return
                    pending.append(heavy_client.submit(query))

        thread = threading.Thread(target=load, daemon=True)
        if heavy:
            thread.start()
            time.sleep(2)
        for number in range(count):
            query = ScoreQuery(_random_tokens(rng, GSM8K[number % len(GSM8K)]), 1, top_k=HEAD)
            seconds.append(time_work(lambda query=query: light_client.submit(query).result()))  # type: ignore[misc]
        light_finished.set()
        if heavy:
            thread.join()
    return {"p50": float(np.percentile(seconds, 50)), "p99": float(np.percentile(seconds, 99))}


def print_results(result: dict[str, Any]) -> None:
    print(f"{result['workload']}; {result['machine']}\n")
    print(f"{'':<22} tokens a step   of bare   tokens/s   of bare")
    for name, row in result["methods"].items():
        print(
            f"{name:<22} {row['tokens_per_step']:>13.0f}   {row['of_bare_tokens_per_step']:>7.3f}"
            f"   {row['tokens_per_second']:>8.0f}   {row['of_bare_speed']:>7.3f}"
        )
    print("\nseconds of a light client's query, p50 and p99")
    for name, percentiles in result["latency"].items():
        print(f"{name:<28} {percentiles['p50']:.3f}  {percentiles['p99']:.3f}")


if __name__ == "__main__":
    main()

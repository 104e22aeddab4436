"""The cost of a teacher's rows over HTTP and over gRPC: bytes and CPU time a token, at both ends.

    python -m benchmarks.wire.http_front [--quick] [--out benchmarks/results/http_front.json]

One process serves prepared rows of a vocabulary of 151,936 on both ports, so that only the service
is measured. The clients: TeacherClient, and the parser of TRL's VLLMClient on an answer of
/v1/completions. HTTP clients send one sequence of 512 tokens at a time, TeacherClient all of them.
float32 over HTTP, float16 over gRPC, as the clients ask.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import psutil

from benchmarks.shared.model_rows import VOCAB, model_rows
from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery, request_of
from protos import teacher_pb2_grpc
from protos.rpc.server import ServerEndpoint, serve
from teacher_service.http.app import HttpTeacher
from teacher_service.http.clients import HttpClients
from teacher_service.http.front import HttpFront, LoadingApp
from teacher_service.metrics import TeacherMetrics
from teacher_service.models.load_progress import LoadProgress
from teacher_service.serving.answer_budget import AnswerBudget
from teacher_service.serving.batcher import Batcher
from teacher_service.serving.scorer import RowScorer
from teacher_service.serving.service import TeacherServicer
from teacher_service.serving.validation import RequestLimits
from teacher_service.serving.weights import WeightUpdater

HEADS, TOKENS, MAX_LENGTH = (8, 64), 512, 8192
Ask = Callable[[list[int]], int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, for tests")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/http_front.json"))
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve_rows(options.serve))
        return
    count = 8 if options.quick else 80
    results = {str(k): measure_protocols(k, count) for k in HEADS}
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    result = {"machine": machine, "vocabulary": VOCAB, "tokens": TOKENS, "k": results}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print_results(result)


async def serve_rows(k: int) -> None:
    """Serve prepared rows with k head ids on two ports; print both."""
    from benchmarks.wire.servers import RecordedEngine, head_of

    engine, budget, metrics = (
        RecordedEngine(head_of(model_rows(), k)),
        AnswerBudget(),
        TeacherMetrics(),
    )
    limits = RequestLimits(VOCAB, MAX_LENGTH, 1024)
    async with Batcher(engine, max_batch_tokens=1 << 16, metrics=metrics) as batcher:
        scorer = RowScorer(batcher, None)
        servicer = TeacherServicer(
            scorer, batcher, WeightUpdater(engine, batcher), limits, metrics, budget
        )
        app = LoadingApp(LoadProgress())
        app.set_teacher(HttpTeacher(scorer, batcher, limits, metrics, HttpClients(budget)))
        async with HttpFront(0).serving(app, ServerEndpoint()) as (url, stop):

            def register(server: grpc.aio.Server) -> str:
                teacher_pb2_grpc.add_TeacherServicer_to_server(servicer, server)
                return "distill.v1.Teacher"

            await serve(
                register,
                ServerEndpoint(),
                grace_seconds=1.0,
                on_ready=lambda port: print(port, url.rpartition(":")[2], flush=True),
                on_stop=stop,
            )


@contextmanager
def start_server(k: int) -> Iterator[tuple[int, int, psutil.Process]]:
    """Yield the ports for gRPC and HTTP, and the process."""
    command = [sys.executable, "-m", "benchmarks.wire.http_front", "--serve", str(k)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            ports = map(int, process.stdout.readline().split())
            yield *ports, psutil.Process(process.pid)  # type: ignore[misc]
        finally:
            process.terminate()


def measure_protocols(k: int, count: int) -> dict[str, dict[str, float]]:
    """Return the figures of each protocol for `count` sequences with k head ids a token."""
    with start_server(k) as (grpc_port, http_port, process):
        connection = http.client.HTTPConnection("127.0.0.1", http_port)
        results = {
            "gRPC": {
                **measure_rounds(process, score_over_grpc(grpc_port, k), count),
                **grpc_bytes(grpc_port, k),
            }
        }
        for name, ask in (("/v1/completions", ask_completions(connection, k)),):
            size = ask(random_sequences(1, seed=9)[0])
            run = score_over_http(ask)
            results[name] = {**measure_rounds(process, run, count), "bytes": size / TOKENS}
        connection.close()
    return results


def random_sequences(count: int, seed: int) -> list[list[int]]:
    shape = (count, TOKENS + 1)
    ids: list[list[int]] = np.random.default_rng(seed).integers(0, VOCAB, shape).tolist()
    return ids


def score_over_grpc(port: int, k: int) -> Callable[[list[list[int]]], None]:
    def run(sequences_to_score: list[list[int]]) -> None:
        with TeacherClient(f"127.0.0.1:{port}") as client:
            queries = [
                ScoreQuery(np.array(sequence, np.int32), 1, top_k=k)
                for sequence in sequences_to_score
            ]
            pending = deque(client.submit(query) for query in queries)
            while pending:
                assert len(pending.popleft().result()) == TOKENS

    return run


def grpc_bytes(port: int, k: int) -> dict[str, float]:
    """Return the bytes of request and answer, a token."""
    query = ScoreQuery(np.array(random_sequences(1, seed=9)[0], np.int32), 1, top_k=k)
    request = request_of(query, "1")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        chunks = list(teacher_pb2_grpc.TeacherStub(channel).Score(iter([request])))
    size = request.ByteSize() + sum(chunk.ByteSize() for chunk in chunks)
    return {"bytes": size / TOKENS}


def ask_completions(connection: http.client.HTTPConnection, k: int) -> Ask:
    """Ask /v1/completions and parse the answer as TRL does; return the bytes of both messages."""
    from trl.generation.vllm_client import VLLMClient

    def ask(ids: list[int]) -> int:
        fields = {"prompt": [ids], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": k}
        body, answer = post(connection, "/v1/completions", fields)
        (choice,) = json.loads(answer)["choices"]
        rows = VLLMClient._format_sequence_logprobs(choice, ids, 1, k)
        assert len(rows["logprobs"]) == TOKENS
        return len(body) + len(answer)

    return ask


def post(
    connection: http.client.HTTPConnection, path: str, fields: dict[str, Any]
) -> tuple[bytes, bytes]:
    body = json.dumps(fields).encode()
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    return body, connection.getresponse().read()


def score_over_http(ask: Ask) -> Callable[[list[list[int]]], None]:
    def run(sequences_to_score: list[list[int]]) -> None:
        for sequence in sequences_to_score:
            ask(sequence)

    return run


def measure_rounds(
    process: psutil.Process, run: Callable[[list[list[int]]], None], count: int
) -> dict[str, float]:
    """Return the median of three rounds after one warm-up round."""
    run(random_sequences(4, seed=8))
    measurements = []
    for seed in range(3):
        sequences_to_score = random_sequences(count, seed)
        client_start, server_start, started = (
            time.process_time(),
            cpu_seconds(process),
            time.monotonic(),
        )
        run(sequences_to_score)
        wall, token_count = time.monotonic() - started, TOKENS * count
        ends = (cpu_seconds(process) - server_start, time.process_time() - client_start)
        measurements.append((token_count / wall, *(end * 1e6 / token_count for end in ends)))
    names = ("tokens_per_second", "server_us", "client_us")
    medians = map(statistics.median, zip(*measurements, strict=True))
    return dict(zip(names, medians, strict=True))


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def print_results(result: dict[str, Any]) -> None:
    print(f"V = {result['vocabulary']}, {result['tokens']} tokens; {result['machine']}")
    print(f"{'':<24}{'B/token':>9}{'server us':>11}{'client us':>11}{'tok/s':>10}")
    for k, rows in result["k"].items():
        for name, row in rows.items():
            print(
                f"{f'{name}, k = {k}':<24}{row['bytes']:>9.0f}{row['server_us']:>11.2f}"
                f"{row['client_us']:>11.2f}{row['tokens_per_second']:>10.0f}"
            )


if __name__ == "__main__":
    main()

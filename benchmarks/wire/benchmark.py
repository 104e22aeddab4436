"""The cost of rows on the wire: this codec and service against those of other servers.

    python -m benchmarks.wire [--quick] [--out benchmarks/results/wire.json]

First the codec alone: bytes, and CPU time of both ends (minimum of interleaved repetitions). Then a
real connection to a server in a second process with prepared rows: the teacher service with its
client, and FastAPI on uvicorn with the standard library's client. Clients send one request at a
time, as the peers' clients do, or four at once. The rows are those of a small trained model with
vocabulary 151,936. Only ratios are comparable between machines.
"""

from __future__ import annotations

import argparse
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.shared.model_rows import VOCAB, model_rows
from benchmarks.wire.formats import FORMATS
from benchmarks.wire.servers import head_of
from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery
from protos import teacher_pb2
from protos.rows.codec import RowBlock, encode_rows

HEADS = (32, 64, 128)
HEAD = 64
MESSAGES = (64, 512, 4096)
HTTP = ("base64 of arrays", "SGLang flat base64", "TRL base64", "vLLM JSON")
CODEC_ROWS = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, for tests")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/wire.json"))
    options = parser.parse_args()
    scale = 0.1 if options.quick else 1.0
    rows = model_rows()
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "vocabulary": VOCAB,
        "codec": {
            str(k): measure_codec(head_of(rows, k), repetitions=2 if options.quick else 5)
            for k in HEADS
        },
        "bytes": {str(k): message_bytes(head_of(rows, k)) for k in HEADS},
        "stream": measure_streams(scale),
    }
    result["targets"] = check_targets(result)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print_results(result)


def measure_codec(rows: RowBlock, repetitions: int) -> dict[str, dict[str, float]]:
    """Return bytes per token, and CPU microseconds per token for encoding and decoding."""
    block = rows.slice(0, CODEC_ROWS)
    server_data = {name: wire.hold(block) for name, wire in FORMATS.items()}
    payloads = {name: wire.encode(server_data[name]) for name, wire in FORMATS.items()}
    for name, wire in FORMATS.items():
        require_equal(name, block, wire.decode(payloads[name]))
    times: dict[str, dict[str, list[float]]] = {name: {"enc": [], "dec": []} for name in FORMATS}
    for _ in range(repetitions):
        for name, wire in FORMATS.items():
            times[name]["enc"].append(time_run(lambda w=wire, n=name: w.encode(server_data[n])))
            times[name]["dec"].append(time_run(lambda w=wire, n=name: w.decode(payloads[n])))
    return {
        name: {
            "bytes": len(payloads[name]) / len(block),
            **{
                end: min(seconds_per_run) * 1e6 / len(block)
                for end, seconds_per_run in times[name].items()
            },
        }
        for name in FORMATS
    }


def time_run(run: Callable[[], object]) -> float:
    """Return the CPU time of one run, averaged over enough runs to take 20 ms."""
    started, count = time.process_time(), 0
    while (spent := time.process_time() - started) < 0.02:
        run()
        count += 1
    return spent / count


def require_equal(name: str, block: RowBlock, decoded: Any) -> None:
    """Check that a format lost nothing: equal ids, and log-probs to its promised precision."""
    if isinstance(decoded, RowBlock):
        decoded = (decoded.head_ids, decoded.head_logprobs)
    first, second = (np.asarray(part).reshape(block.head_logprobs.shape) for part in decoded[:2])
    ids, logprobs = (first, second) if first.dtype.kind == "i" else (second, first)
    np.testing.assert_array_equal(ids, block.head_ids, err_msg=name)
    np.testing.assert_allclose(logprobs, block.head_logprobs, rtol=1e-3, err_msg=name)


def message_bytes(rows: RowBlock) -> dict[str, float]:
    """Return the bytes per token of whole messages, including all fields of the message."""
    bytes_by_case = {}
    for tokens in (64, 512):
        block = rows.slice(0, tokens)
        student_rows = RowBlock(None, block.head_logprobs, block.tail_logmass, block.token_logprobs)
        for owner, rows_sent in (("teacher's ids", block), ("student's ids", student_rows)):
            chunk = teacher_pb2.ScoreChunk(
                request_id="123456",
                first_position=1024,
                count=tokens,
                payload=encode_rows(rows_sent),
                last=True,
                scoring_digest=1 << 63,
            )
            bytes_by_case[f"{owner}, {tokens} a message"] = chunk.ByteSize() / tokens
    return bytes_by_case


def measure_streams(scale: float) -> dict[str, dict[str, float]]:
    """Return tokens per second and CPU time of both ends, by server and tokens per message."""
    rates = {}
    with start_server("grpc", str(HEAD)) as (port, process):
        for tokens in MESSAGES:
            count = max(8, int(scale * 1_500_000 / tokens))
            rates[f"ours, {tokens}"] = measure_rounds(process, tokens, count, grpc_round(port))
    for name in HTTP:
        with start_server("http", str(HEAD), name) as (port, process):
            for tokens in MESSAGES[:2] if name == "vLLM JSON" else MESSAGES:
                share = 0.06 if "base64 of" in name or "SGLang" in name else 0.008
                count = max(2, int(scale * share * 1_500_000 / max(tokens, 256) / 4)) * 4
                for clients in (1, 4):
                    title = f"{name}, {clients} at once, {tokens}"
                    rates[title] = measure_rounds(
                        process, tokens, count, http_round(port, name, clients)
                    )
    return rates


@contextmanager
def start_server(*arguments: str) -> Iterator[tuple[int, psutil.Process]]:
    command = [sys.executable, "-m", "benchmarks.wire.servers", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield int(process.stdout.readline()), psutil.Process(process.pid)
        finally:
            process.terminate()


Round = Callable[[int, int], None]


def grpc_round(port: int) -> Round:
    def run(tokens: int, count: int) -> None:
        # All different, because the service scores concurrent equal queries only once.
        ids = np.random.default_rng(0).integers(0, VOCAB, (count, tokens + 1), dtype=np.int32)
        with TeacherClient(f"127.0.0.1:{port}") as client:
            pending = deque(
                client.submit(ScoreQuery(sequence_ids, 1, top_k=HEAD)) for sequence_ids in ids
            )
            while pending:
                assert len(pending.popleft().result()) == tokens

    return run


def http_round(port: int, name: str, clients: int) -> Round:
    """With several connections, the server encodes while the clients decode."""
    decode = FORMATS[name].decode

    def client(tokens: int, count: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        for _ in range(count):
            connection.request("GET", f"/{tokens}")
            decode(connection.getresponse().read())
        connection.close()

    def run(tokens: int, count: int) -> None:
        with ThreadPoolExecutor(clients) as threads:
            for client_future in [
                threads.submit(client, tokens, count // clients) for _ in range(clients)
            ]:
                client_future.result()

    return run


def measure_rounds(
    process: psutil.Process, tokens: int, count: int, run: Round
) -> dict[str, float]:
    """Return the median of three rounds after one warm-up round."""
    run(tokens, max(4, count // 32 * 4))
    measurements = []
    for _ in range(3):
        client_start, server_start, started = (
            time.process_time(),
            cpu_seconds(process),
            time.monotonic(),
        )
        run(tokens, count)
        wall = time.monotonic() - started
        token_count = tokens * count
        ends = (cpu_seconds(process) - server_start, time.process_time() - client_start)
        measurements.append((token_count / wall, *(end * 1e6 / token_count for end in ends)))
    rate, server_cpu, client_cpu = (
        statistics.median(column) for column in zip(*measurements, strict=True)
    )
    return {"tokens_per_second": rate, "server_us": server_cpu, "client_us": client_cpu}


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def check_targets(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the targets of the benchmark with the measured values."""
    stream = result["stream"]
    own_stream = stream["ours, 512"]

    def connection_ratio(name: str) -> float:
        row = stream[f"{name}, 1 at once, 512"]
        return float(own_stream["tokens_per_second"] / row["tokens_per_second"])

    def codec_ratio(name: str) -> float:
        ends = {n: row["enc"] + row["dec"] for n, row in result["codec"][str(HEAD)].items()}
        return float(ends[name] / ends["ours"])

    max_bytes = {
        str(k): max(v for n, v in result["bytes"][str(k)].items() if "teacher" in n) for k in HEADS
    }
    both_ends = max(
        stream[f"ours, {n}"]["server_us"] + stream[f"ours, {n}"]["client_us"] for n in (512, 4096)
    )
    checked_targets = [
        ("bytes a token, k = 64", max_bytes["64"], "<=", 284),
        ("bytes a token, k = 32", max_bytes["32"], "<=", 148),
        ("CPU us a token, both ends, >= 512 a message", both_ends, "<=", 1.5),
        ("tokens a second through a stream", own_stream["tokens_per_second"], ">=", 0.7e6),
        *(
            (f"times {name}, {part}", ratio(name), ">=", aim)
            for name, aim in (("SGLang flat base64", 10), ("TRL base64", 50), ("vLLM JSON", 300))
            for part, ratio in (("codec", codec_ratio), ("connection", connection_ratio))
        ),
    ]
    return {
        name: {
            "value": value,
            "aim": f"{sign} {aim:g}",
            "met": value <= aim if sign == "<=" else value >= aim,
        }
        for name, value, sign, aim in checked_targets
    }


def print_results(result: dict[str, Any]) -> None:
    print(f"V = {result['vocabulary']}; {result['machine']}")
    for k in HEADS:
        print(f"\ncodec, k = {k:<17}{'B/token':>9}{'enc us':>9}{'dec us':>9}{'of ours':>9}")
        base = result["codec"][str(k)]["ours"]
        for name, row in result["codec"][str(k)].items():
            ratio = (row["enc"] + row["dec"]) / (base["enc"] + base["dec"])
            print(
                f"{name:<28}{row['bytes']:>9.1f}{row['enc']:>9.3f}{row['dec']:>9.3f}{ratio:>9.1f}"
            )
    titles = f"{'Mtok/s':>9}{'server us':>11}{'client us':>11}{'ours is':>9}"
    print(f"\n{f'a connection, k = {HEAD}':<34}{titles}")
    for name, row in result["stream"].items():
        tokens = name.rpartition(", ")[2]
        ratio = result["stream"][f"ours, {tokens}"]["tokens_per_second"] / row["tokens_per_second"]
        print(
            f"{name:<34}{row['tokens_per_second'] / 1e6:>9.4f}{row['server_us']:>11.2f}"
            f"{row['client_us']:>11.2f}{ratio:>8.1f}x"
        )
    print()
    for name, row in result["targets"].items():
        mark = "met" if row["met"] else "MISSED"
        print(f"{name:<46}{row['value']:>14.6g}   {row['aim']:<12}{mark}")


if __name__ == "__main__":
    main()

"""The cost of a teacher service: in the trainer's process, over loopback, over a 40 Mbit/s link.

    python -m benchmarks.evidence.service_cost --data train.jsonl [--rounds 9]    (root, iproute2)

SmolLM2-135M-Instruct scores answers of GSM8K for ids that a student chose: 16 head ids and 48 draws
a row, the default of on-policy jobs. The three ways take turns with the same sequences; the link is
a network namespace whose loopback a token bucket limits (`tc qdisc add dev lo root tbf`), so that
requests and answers share the 40 Mbit/s. Figures: tokens a second, seconds of CPU a token of all
processes, bytes a token. Writes benchmarks/results/evidence_service_cost.json. Takes ten minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.rollouts.ahead import run_service
from benchmarks.shared.intervals import mean_and_interval
from benchmarks.shared.model_pairs import make_pair
from benchmarks.shared.results import RESULTS, describe_machine, format_json
from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery
from protos.errors import DistillError

HEAD, DRAWS, SEQUENCES, LONGEST = 16, 48, 16, 192
THREADS = 2
LINK = "40mbit"
SHAPED = f"ip link set lo up && tc qdisc add dev lo root tbf rate {LINK} burst 128k latency 400ms"
WAYS = ("in the process", "loopback", "40 Mbit/s")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="train.jsonl of GSM8K")
    parser.add_argument("--work", type=Path, default=Path("runs/draws"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS / "evidence_service_cost.json")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args(arguments)
    teacher = make_pair("real", options.work, options.data).teacher
    if options.way:
        answer_rounds(options.way, teacher, options.data)
        return
    rounds_by_way: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        children = {way: stack.enter_context(start_child(way, options)) for way in WAYS}
        for turn in range(options.rounds + 1):
            for way, process in children.items():
                assert process.stdin
                assert process.stdout
                process.stdin.write("\n")
                process.stdin.flush()
                measured = json.loads(process.stdout.readline())
                if turn:  # the first round warms up
                    rounds_by_way[way].append(measured)
        for process in children.values():
            assert process.stdin is not None
            process.stdin.close()
    result = {"machine": describe_machine(), "threads": THREADS}
    rounds_of = [
        {"way": way, **measurement}
        for way, measured in rounds_by_way.items()
        for measurement in measured
    ]
    options.out.write_text(format_json({**result, "rounds": rounds_of}))
    print_results(rounds_by_way)


def start_child(way: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.evidence.service_cost", "--way", way]
    command += ["--data", str(options.data), "--work", str(options.work)]
    if way == WAYS[2]:
        command = ["unshare", "--net", "sh", "-c", f'{SHAPED} && exec "$@"', "sh", *command]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def answer_rounds(way: str, teacher: Path, data: Path) -> None:
    """Score all sequences for every line of stdin; print seconds, CPU seconds and tokens."""
    queries = make_queries(teacher, data)
    if way == WAYS[0]:
        import torch

        from teacher_service.engines.hf import HfEngine

        torch.set_num_threads(THREADS)
        engine = HfEngine(str(teacher))
        time_rounds(queries, lambda: raise_errors(engine.score(queries)))
        return
    command = ["teacher_service", "--model", str(teacher), "--no-cache"]
    with (
        tempfile.TemporaryDirectory() as folder,
        run_service(command, Path(folder) / "log", threads=THREADS) as address,
        TeacherClient(address) as client,
    ):
        time_rounds(queries, lambda: raise_errors(score_with_service(client, queries)))


def score_with_service(client: TeacherClient, queries: Sequence[ScoreQuery]) -> list[Any]:
    answers = [client.submit(query) for query in queries]
    return [answer.result() for answer in answers]


def raise_errors(answers: Sequence[Any]) -> None:
    for answer in answers:
        if isinstance(answer, DistillError):
            raise answer


def time_rounds(queries: Sequence[ScoreQuery], score: Callable[[], None]) -> None:
    tokens = sum(len(query.token_ids) - query.start for query in queries)
    for _ in sys.stdin:
        cpu, began = cpu_seconds(), time.perf_counter()
        score()
        seconds = time.perf_counter() - began
        print(
            json.dumps({"seconds": seconds, "cpu": cpu_seconds() - cpu, "tokens": tokens}),
            flush=True,
        )


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its children so far."""
    this_process = psutil.Process()
    times = [child.cpu_times() for child in (this_process, *this_process.children(recursive=True))]
    return float(sum(child.user + child.system for child in times))


def make_queries(teacher: Path, data: Path) -> list[ScoreQuery]:
    """Return the queries: questions with answers of at most LONGEST tokens, all answers scored."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(teacher)
    rng = np.random.default_rng(0)
    queries = []
    for line in data.read_text().splitlines():
        record = json.loads(line)
        start = len(tokenizer(f"{record['question']}\n")["input_ids"])
        ids = tokenizer(f"{record['question']}\n{record['answer']}")["input_ids"]
        if len(ids) > LONGEST:
            continue
        rows, size = len(ids) - start, len(tokenizer)
        head = np.argsort(rng.random((rows, 512)), axis=1)[:, :HEAD]
        draws = rng.integers(512, size, (rows, DRAWS))
        queries.append(
            ScoreQuery(
                np.array(ids, np.int32),
                start,
                head_ids=head.astype(np.int32),
                draw_ids=draws.astype(np.int32),
            )
        )
        if len(queries) == SEQUENCES:
            return queries
    raise SystemExit(f"{data} has {len(queries)} sequences of {LONGEST} tokens, not {SEQUENCES}")


def print_results(rounds_by_way: dict[str, list[dict[str, float]]]) -> None:
    alone = rounds_by_way[WAYS[0]]
    for way, measured in rounds_by_way.items():
        speed = statistics.median(
            measurement["tokens"] / measurement["seconds"] for measurement in measured
        )
        cpu = statistics.median(
            measurement["cpu"] / measurement["tokens"] for measurement in measured
        )
        ratios = [a["seconds"] / b["seconds"] for a, b in zip(alone, measured, strict=True)]
        mean, half = mean_and_interval(ratios)
        print(f"{way:<16}{speed:>8.0f} tokens/s {1000 * cpu:>7.2f} ms CPU a token", end="")
        print(f"   {mean:.3f} +- {half:.3f} of the speed in the process")


if __name__ == "__main__":
    main()

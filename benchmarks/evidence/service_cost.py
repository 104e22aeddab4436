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

from benchmarks.rollouts.ahead import served
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
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        children = {way: stack.enter_context(child(way, options)) for way in WAYS}
        for turn in range(options.rounds + 1):
            for way, process in children.items():
                assert process.stdin
                assert process.stdout
                process.stdin.write("\n")
                process.stdin.flush()
                measured = json.loads(process.stdout.readline())
                if turn:  # the first round warms up
                    found[way].append(measured)
        for process in children.values():
            assert process.stdin is not None
            process.stdin.close()
    result = {"machine": describe_machine(), "threads": THREADS}
    rounds_of = [{"way": way, **one} for way, measured in found.items() for one in measured]
    options.out.write_text(format_json({**result, "rounds": rounds_of}))
    show(found)


def child(way: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.evidence.service_cost", "--way", way]
    command += ["--data", str(options.data), "--work", str(options.work)]
    if way == WAYS[2]:
        command = ["unshare", "--net", "sh", "-c", f'{SHAPED} && exec "$@"', "sh", *command]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def answer_rounds(way: str, teacher: Path, data: Path) -> None:
    """Score all sequences for every line of stdin; print seconds, CPU seconds and tokens."""
    queries = asked(teacher, data)
    if way == WAYS[0]:
        import torch

        from teacher_service.engines.hf import HfEngine

        torch.set_num_threads(THREADS)
        engine = HfEngine(str(teacher))
        rounds(queries, lambda: check(engine.score(queries)))
        return
    serve = ["teacher_service", "--model", str(teacher), "--no-cache"]
    with (
        tempfile.TemporaryDirectory() as folder,
        served(serve, Path(folder) / "log", threads=THREADS) as address,
        TeacherClient(address) as client,
    ):
        rounds(queries, lambda: check(scored(client, queries)))


def scored(client: TeacherClient, queries: Sequence[ScoreQuery]) -> list[Any]:
    answers = [client.submit(one) for one in queries]
    return [answer.result() for answer in answers]


def check(answers: Sequence[Any]) -> None:
    for answer in answers:
        if isinstance(answer, DistillError):
            raise answer


def rounds(queries: Sequence[ScoreQuery], score: Callable[[], None]) -> None:
    tokens = sum(len(one.token_ids) - one.start for one in queries)
    for _ in sys.stdin:
        cpu, began = busy(), time.perf_counter()
        score()
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "cpu": busy() - cpu, "tokens": tokens}), flush=True)


def busy() -> float:
    """Return the CPU seconds of this process and its children so far."""
    here = psutil.Process()
    times = [one.cpu_times() for one in (here, *here.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


def asked(teacher: Path, data: Path) -> list[ScoreQuery]:
    """Return the queries: questions with answers of at most LONGEST tokens, all answers scored."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(teacher)
    chance = np.random.default_rng(0)
    found = []
    for line in data.read_text().splitlines():
        record = json.loads(line)
        start = len(tokenizer(f"{record['question']}\n")["input_ids"])
        ids = tokenizer(f"{record['question']}\n{record['answer']}")["input_ids"]
        if len(ids) > LONGEST:
            continue
        rows, size = len(ids) - start, len(tokenizer)
        head = np.argsort(chance.random((rows, 512)), axis=1)[:, :HEAD]
        draws = chance.integers(512, size, (rows, DRAWS))
        found.append(
            ScoreQuery(
                np.array(ids, np.int32),
                start,
                head_ids=head.astype(np.int32),
                draw_ids=draws.astype(np.int32),
            )
        )
        if len(found) == SEQUENCES:
            return found
    raise SystemExit(f"{data} has {len(found)} sequences of {LONGEST} tokens, not {SEQUENCES}")


def show(found: dict[str, list[dict[str, float]]]) -> None:
    alone = found[WAYS[0]]
    for way, measured in found.items():
        speed = statistics.median(one["tokens"] / one["seconds"] for one in measured)
        cpu = statistics.median(one["cpu"] / one["tokens"] for one in measured)
        ratios = [a["seconds"] / b["seconds"] for a, b in zip(alone, measured, strict=True)]
        mean, half = mean_and_interval(ratios)
        print(f"{way:<16}{speed:>8.0f} tokens/s {1000 * cpu:>7.2f} ms CPU a token", end="")
        print(f"   {mean:.3f} +- {half:.3f} of the speed in the process")


if __name__ == "__main__":
    main()

"""Measures how a teacher's memory grows under load.

    python -m tests.faults.memory_growth [--minutes 120] [--rate 20]

starts a teacher with all tiers of its cache but Redis, asks it that many new sequences a second,
and prints its memory every minute and, after a third of the time, the growth in MiB an hour. Until
then the cache, a GiB of it on disk, must be full: what it keeps of each entry is no leak.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil

from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery
from tests.faults.sequences import VOCAB, WAIT, fake
from tests.teacher_service.processes import TeacherProcess

MIB = 1 << 20


def slope(counts: Sequence[float], sizes: Sequence[float]) -> float:
    """Of the line through the points that is nearest to most of them (Theil and Sen): a page that
    the kernel took or gave in one moment does not bend it.
    """
    x, y = np.array(counts, dtype=float), np.array(sizes, dtype=float)
    later, earlier = np.triu_indices(len(x), 1)[::-1]
    return float(np.median((y[later] - y[earlier]) / (x[later] - x[earlier])))


def new_queries(
    count: int, rng: np.random.Generator, *, length: int = 50, top_k: int = 8
) -> list[ScoreQuery]:
    """Return random queries that no cache has."""
    return [
        ScoreQuery(rng.integers(0, VOCAB, length).astype(np.int32), 1, top_k=top_k)
        for _ in range(count)
    ]


def bytes_per_query(
    teacher: TeacherProcess,
    ask: Callable[[int], list[ScoreQuery]],
    *,
    rounds: int,
    queries_per_round: int,
) -> float:
    """Return the growth of the teacher's memory per query; a third of the rounds is warm-up."""
    server = psutil.Process(teacher.process.pid)
    query_counts, sizes = [], []
    with TeacherClient(teacher.address) as client:
        for number in range(rounds):
            for answer in [client.submit(query) for query in ask(queries_per_round)]:
                answer.result(WAIT)
            query_counts.append(float(number * queries_per_round))
            sizes.append(float(server.memory_info().rss))
    return slope(query_counts[rounds // 3 :], sizes[rounds // 3 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--rate", type=int, default=20, help="sequences a second")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        tiers = ["--cache-dir", f"{directory}/rows", "--cache-memory-mib", "16"]
        limit = ["--cache-disk-gib", "1"]
        log = Path(directory) / "log"
        teacher = TeacherProcess([*fake(), *tiers, *limit], log=log, launched=True)
        try:
            _watch(teacher, Path(directory) / "rows", options.minutes, options.rate)
        finally:
            teacher.close()


def _watch(teacher: TeacherProcess, cache: Path, minutes: float, rate: int) -> None:
    server, rng = psutil.Process(teacher.process.pid), np.random.default_rng()
    start_time = last_report = time.monotonic()
    hours, sizes = [], []
    with TeacherClient(teacher.address) as client:
        while (now := time.monotonic()) < start_time + 60 * minutes:
            queries = new_queries(rate, rng, length=300, top_k=40)
            for answer in [client.submit(query) for query in queries]:
                answer.result(WAIT)
            hours.append((now - start_time) / 3600)
            sizes.append(server.memory_info().rss / MIB)
            if now - last_report >= 60:
                last_report = now
                cache_bytes = sum(
                    file.stat().st_size for file in cache.rglob("*") if file.is_file()
                )
                line = f"{hours[-1] * 60:6.1f} min  {sizes[-1]:8.2f} MiB"
                print(f"{line}, {cache_bytes / MIB:8.2f} on disk", flush=True)
            time.sleep(max(0.0, now + 1 - time.monotonic()))
    warm = len(hours) // 3
    stride = max(1, len(hours) // 500)  # the number of pairs is the square of that
    grown = slope(hours[warm::stride], sizes[warm::stride])
    print(f"{len(hours) * rate:,} sequences: {grown:+.2f} MiB an hour after {hours[warm]:.2f} h")


if __name__ == "__main__":
    main()

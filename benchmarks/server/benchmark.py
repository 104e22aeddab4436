"""A job server with ten thousand jobs: python -m benchmarks.server [--submits N] [--watchers N]

Uses the real server and client, with light processes as trainers. Writes results/server.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import grpc.aio
import numpy as np

from clients.jobs.client import DistillClient
from protos import distill_pb2, distill_pb2_grpc
from protos.rpc.transport import CHANNEL_OPTIONS
from tests.distill_server.conftest import Server, eventually, job_config
from tests.distill_server.jobs.history import History

RESULTS = Path(__file__).parents[1] / "results" / "server.json"
SLOTS, CLIENTS, PAGES = 4, 8, 400
_STREAMS_PER_CONNECTION = 100


@dataclass(frozen=True)
class LoadResults:
    """The results of `measure_load`: times in seconds, resident memory of the server in bytes."""

    submits: int
    submit_seconds: float
    list_p50: float
    list_p99: float
    restart_seconds: float
    memory_before: int
    memory_after: int
    events_checked: int
    jobs_lost: int


def measure_load(server: Server, submits: int) -> LoadResults:
    """Submit and list jobs while others run in all slots; then kill and restart the server.

    At the end, every rule of the jobs' history is checked.
    """
    history = History()
    before = resident_bytes(server)
    began = time.monotonic()
    submit_all(server.address, submits, history)
    submit_seconds = time.monotonic() - began
    after = resident_bytes(server)
    pages = time_lists(server.address, PAGES)
    server.kill()
    began = time.monotonic()
    server.start()
    with DistillClient(server.address) as client:
        client.list(limit=1)
        restart = time.monotonic() - began
        job_ids = {job.id for page in list_pages(client) for job in page}
    return LoadResults(
        submits=submits,
        submit_seconds=submit_seconds,
        list_p50=float(np.percentile(pages, 50)),
        list_p99=float(np.percentile(pages, 99)),
        restart_seconds=restart,
        memory_before=before,
        memory_after=max(after, resident_bytes(server)),
        events_checked=history.check(server.runs, SLOTS),
        jobs_lost=submits - len(job_ids),
    )


def submit_all(address: str, submits: int, history: History) -> None:
    """Submit from several clients at once, each job with its own idempotency key."""
    clients = threading.local()

    def submit(number: int) -> None:
        if not hasattr(clients, "mine"):
            clients.client = DistillClient(address)
        key = f"key {number}"
        job = clients.client.submit(job_config(f"n{number} pause=0.1", 20), idempotency_key=key)
        history.submitted(key, job.id)

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(submit, range(submits)))


def time_lists(address: str, pages: int) -> Sequence[float]:
    """Return the seconds of each page, from the newest jobs down, repeatedly."""
    seconds, before = [], ""
    with DistillClient(address) as client:
        for _ in range(pages):
            began = time.monotonic()
            jobs = client.list(limit=50, before_id=before)
            seconds.append(time.monotonic() - began)
            before = jobs[-1].id if len(jobs) == 50 else ""
    return seconds


def list_pages(client: DistillClient) -> Sequence[Sequence[object]]:
    pages, before = [], ""
    while page := client.list(limit=500, before_id=before):
        pages.append(page)
        before = page[-1].id
    return pages


def resident_bytes(server: Server) -> int:
    assert server.process is not None
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10


async def watch_all(address: str, job_id: str, watchers: int) -> list[list[int]]:
    """Return the `seq` numbers that each watcher received; every tenth watcher reads slowly."""
    connections = -(-watchers // _STREAMS_PER_CONNECTION)
    channels = [
        grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, ("bench.number", number)])
        for number in range(connections)
    ]

    async def watch(number: int) -> list[int]:
        stub = distill_pb2_grpc.DistillStub(channels[number % connections])
        sequence_numbers = []
        async for event in stub.WatchJob(distill_pb2.WatchJobRequest(job_id=job_id)):
            sequence_numbers.append(event.seq)
            if number % 10 == 0:
                await asyncio.sleep(0.05)
        return sequence_numbers

    try:
        return list(await asyncio.gather(*(watch(number) for number in range(watchers))))
    finally:
        for channel in channels:
            await channel.close()


@dataclass(frozen=True)
class WatchResults:
    """The results of many watchers of one job; memory is the server's resident bytes."""

    watchers: int
    events: int
    seconds: float
    memory_before: int
    memory_after: int


def measure_watching(server: Server, watchers: int, steps: int) -> WatchResults:
    """Measure many watchers of one job. Raises AssertionError if one misses or repeats an event."""
    with DistillClient(server.address) as client:
        job = client.submit(job_config("watched pause=0.2", steps))
        eventually(lambda: client.get(job.id).step >= 1)
        before, began = resident_bytes(server), time.monotonic()
        sequence_numbers = asyncio.run(watch_all(server.address, job.id, watchers))
        seconds, after = time.monotonic() - began, resident_bytes(server)
        events = client.get(job.id).last_seq
    assert all(numbers == list(range(1, events + 1)) for numbers in sequence_numbers)
    return WatchResults(watchers, events, seconds, before, after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--submits", type=int, default=10_000)
    parser.add_argument("--watchers", type=int, default=1_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = Server(Path(directory) / "runs", SLOTS)
        server.start()
        try:
            watching = measure_watching(server, options.watchers, steps=40)
        finally:
            server.clean_up()
        server = Server(Path(directory) / "many", SLOTS)
        server.start()
        try:
            load = measure_load(server, options.submits)
        finally:
            server.clean_up()
    result = {"cpus": os.cpu_count(), "load": asdict(load), "watching": asdict(watching)}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

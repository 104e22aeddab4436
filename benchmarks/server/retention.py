"""A job database with retention: python -m benchmarks.server.retention [--jobs N] [--steps N]

Holds a constant number of jobs: jobs end and are removed, new ones start, and one job runs all the
time. Measures the list of jobs over gRPC and the size of the database before and after them. The
clock of the jobs is simulated: a job ends every minute. Writes results/retention.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc.aio
import numpy as np

from clients.config.kinds import AnyJob
from clients.config.on_policy import OnPolicyJob
from clients.config.tables.common import StudentConfig
from clients.config.tables.data import DataConfig
from clients.jobs.job import JobState
from distill_server.jobs.change_notifier import ChangeNotifier
from distill_server.jobs.control import JobControl
from distill_server.jobs.database import open_database
from distill_server.jobs.run_files import RunFiles
from distill_server.jobs.store import Change, JobStore
from distill_server.retention.keeper import Keeper
from distill_server.retention.removals import Removals
from distill_server.rpc.service import DistillService
from distill_server.rpc.streams import Streams
from protos import distill_pb2, distill_pb2_grpc

RESULTS = Path(__file__).parents[1] / "results" / "retention.json"
LISTS = 400
_MINUTE, _DAY = 60.0, 24 * 3600.0
# Steps of one job, of which a poll of the scheduler stores so many at once.
STEPS, POLL = 50, 50
_JOBS_BETWEEN_LOOKS = 10  # ten minutes, as in a server
_METRICS = ("loss", "kl/teacher", "entropy", "ratio/mean", "length/mean", "grad_norm", "lr")
_METRICS += ("tokens", "tokens_per_sec", "time/step", "time/rollout", "time/teacher_wait")


@dataclass(frozen=True)
class Size:
    """The database at one time: jobs, events, bytes of its files, and a page of 50 jobs in s."""

    jobs: int
    events: int
    database_bytes: int
    list_p50: float
    list_p99: float


class Site:
    """A store with a service in this process. Jobs have no run directories and no trainers."""

    def __init__(self, root: Path, jobs: int) -> None:
        self.database = root / "server.sqlite"
        self._max_jobs = jobs
        self._open = open_database(self.database)
        self._db = self._open.__enter__()
        self._clock = 1e9
        notifier = ChangeNotifier()
        self.store = JobStore(self._db, on_change=notifier.notify, now=lambda: self._clock)
        files = RunFiles()
        removals = Removals(self._db, self.store, root, files, notifier.notify)
        self._keeper = Keeper(removals, jobs * _MINUTE / _DAY, lambda: self._clock)
        control = JobControl(self.store, root, lambda: None)
        streams = Streams(self.store, root, notifier, files)
        self.service = DistillService(self.store, root, control, streams, removals, files)
        self._jobs_made = 0
        self._active: deque[str] = deque()

    def close(self) -> None:
        self._open.__exit__(None, None, None)

    def add(self) -> None:
        """Queue a job and start it."""
        self._jobs_made += 1
        job_id = f"on-policy-job-{self._jobs_made}"
        self.store.add(job_id, _make_job(f"job-{self._jobs_made}"), "")
        self.store.change(job_id, Change(JobState.PREPARING), Change(JobState.RUNNING))
        self._active.append(job_id)

    def step(self, job_id: str, first: int) -> None:
        """Make some steps of a job."""
        values = dict.fromkeys(_METRICS, 0.123456789012)
        steps = range(first, first + POLL)
        self.store.change(job_id, *(Change(step=step, metrics=values) for step in steps))

    def end(self) -> None:
        """End the oldest active job, a minute after the previous end."""
        self._clock += _MINUTE
        self.store.change(self._active.popleft(), Change(JobState.SUCCEEDED, phase=""))

    async def run(self, steps: int, long: str) -> None:
        """Make `steps` steps: ten of eleven in jobs that end, one of eleven in the job `long`."""
        steps_done, long_step = 0, self.store.job(long).step + 1
        while steps_done < steps:
            self.add()
            for first in range(1, STEPS + 1, POLL):
                self.step(self._active[-1], first)
            self.end()
            steps_done += STEPS
            if self._jobs_made % 10 == 0:
                self.step(long, long_step)
                long_step += POLL
                steps_done += POLL
            if self._jobs_made % _JOBS_BETWEEN_LOOKS == 0:
                await self._keeper.run_once()
        await self._keeper.run_once()

    async def size(self) -> Size:
        """Measure lists, and the database after its log was written into it."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        counts = {t: self._db.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in _TABLES}
        server = grpc.aio.server()
        distill_pb2_grpc.add_DistillServicer_to_server(self.service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        times = []
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = distill_pb2_grpc.DistillStub(channel)
            for _ in range(LISTS):
                began = time.perf_counter()
                await stub.ListJobs(distill_pb2.ListJobsRequest(limit=50))
                times.append(time.perf_counter() - began)
        await server.stop(None)
        return Size(
            jobs=counts["jobs"],
            events=counts["events"],
            database_bytes=self.database.stat().st_size,
            list_p50=float(np.quantile(times, 0.5)),
            list_p99=float(np.quantile(times, 0.99)),
        )


# Per cent of the jobs that are made before the first measurement, so that some were removed.
_WARM_UP = 130
_TABLES = ("jobs", "events")


async def measure(root: Path, jobs: int, steps: int) -> tuple[Size, Size]:
    """Return the sizes with `jobs` jobs, of `STEPS` steps each, and after `steps` further steps."""
    with _open_site(root, jobs) as site:
        site.add()
        long = "on-policy-job-1"
        site._active.popleft()
        await site.run(_WARM_UP * jobs * STEPS // 100, long)
        before = await site.size()
        await site.run(steps, long)
        return before, await site.size()


@contextmanager
def _open_site(root: Path, jobs: int) -> Iterator[Site]:
    site = Site(root, jobs)
    try:
        yield site
    finally:
        site.close()


def _make_job(name: str) -> AnyJob:
    student, data = StudentConfig(model="tiny"), DataConfig(path="prompts.jsonl")
    return OnPolicyJob(student=student, data=data, name=name, max_steps=STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=1_000_000)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        before, after = asyncio.run(measure(Path(root), options.jobs, options.steps))
    result = {
        "steps": options.steps,
        "before": asdict(before),
        "after": asdict(after),
        "seconds": round(time.monotonic() - began),
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

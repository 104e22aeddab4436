"""Servers of eight jobs are killed repeatedly; so are ranks and launchers; clocks jump."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from clients.jobs.client import DistillClient
from clients.jobs.job import JobEvent, JobState
from distill_server.runners.local.process import Identity, family, identity_of, send_signal
from tests.distill_server.conftest import Server, eventually, job_config
from tests.distill_server.jobs.history import History

KILLS = int(os.environ.get("DISTILL_REPEATS", "3"))
JOBS = 8
# The documented limit; it takes about one second.
ORPHAN_SECONDS = 10.0


class Watcher(threading.Thread):
    """Watches a job from its first event to its last, through every restart of the server."""

    def __init__(self, address: str, job_id: str) -> None:
        super().__init__()
        self.address, self.job_id = address, job_id
        self.events: list[JobEvent] = []
        self.start()

    def run(self) -> None:
        with DistillClient(self.address) as client:
            self.events.extend(client.watch(self.job_id))

    def result(self) -> list[JobEvent]:
        self.join(120)
        assert not self.is_alive()
        return self.events


def trainer_of(server: Server, job_id: str, attempt: int = 1) -> Identity:
    card = server.card(job_id, attempt)
    return Identity(str(card["boot_id"]), card["child_pid"], card["child_start_time"])


def test_eight_jobs_outlive_their_servers(make_server: Callable[..., Server]) -> None:
    server, history = make_server(slots=JOBS), History()
    with DistillClient(server.address) as client:
        jobs = []
        for number in range(JOBS):
            # The first job ends while no server runs; the next server must find its exit code.
            ends = "fail_at=3 pause=0.4" if number == 0 else "pause=0.05"
            key = f"key {number}"
            job = client.submit(job_config(f"{ends} n={number}", 1_000_000), idempotency_key=key)
            history.submitted(key, job.id)
            jobs.append(job.id)
        watchers = [Watcher(server.address, job_id) for job_id in jobs]
        trainers = [trainer_of(server, job_id) for job_id in jobs]
        for _ in range(KILLS):
            steps = [client.get(job_id).step for job_id in jobs[1:]]
            server.kill()
            server.start()
            assert all(identity_of(identity.pid) == identity for identity in trainers[1:])
            for job_id, step in zip(jobs[1:], steps, strict=True):
                eventually(lambda j=job_id, s=step: client.get(j).step > s)
        repeated_job = client.submit(
            job_config(f"pause=0.05 n={JOBS - 1}", 1_000_000), idempotency_key=f"key {JOBS - 1}"
        )
        history.submitted(f"key {JOBS - 1}", repeated_job.id)
        for job_id in jobs[1:]:
            client.cancel(job_id)
        ended_jobs = [client.wait(job_id, timeout=60) for job_id in jobs]
        assert [job.state for job in ended_jobs] == [
            JobState.FAILED,
            *[JobState.CANCELLED] * (JOBS - 1),
        ]
        assert {job.attempt for job in ended_jobs} == {1}
        assert {job.id for job in client.list()} == set(jobs)
    for job_id, watcher in zip(jobs, watchers, strict=True):
        history.watched(job_id, watcher.result())
    history.check(server.runs, JOBS)


RANKS = """
import os, sys, time
print('rank', os.environ['RANK'], 'is', os.getpid(), flush=True)
time.sleep(1000)
"""


def test_a_rank_the_launcher_or_the_group_is_killed(make_server: Callable[..., Server]) -> None:
    """With torch's launcher, whose ranks are in their own sessions; no process is left."""
    server, history = make_server(slots=3, ranks=RANKS), History()
    with DistillClient(server.address) as client:
        jobs = [client.submit(job_config(name)).id for name in ("rank", "launcher", "group")]
        for job_id in jobs:
            history.submitted("", job_id)
        marks = [str(server.card(job_id)["mark"]) for job_id in jobs]
        logs = [server.runs / job_id / "logs/attempt-1/rank-0.log" for job_id in jobs]
        for log in logs:
            eventually(lambda log=log: log.read_text().count(" is ") == 2, 120)
        rank_lines = [
            line.split() for line in logs[0].read_text().splitlines() if "rank 1 is" in line
        ]
        rank = identity_of(int(rank_lines[0][-1]))
        launchers = [trainer_of(server, job_id) for job_id in jobs]
        families = [set(family(mark)) for mark in marks]
        assert rank in families[0]
        assert all(len(members) >= 3 for members in families)
        assert rank is not None
        send_signal(rank, signal.SIGKILL)
        send_signal(launchers[1], signal.SIGKILL)
        for identity in families[2]:
            send_signal(identity, signal.SIGKILL)
        kill_time = time.monotonic()
        # The launcher notices the death of a rank and ends the other rank.
        eventually(lambda: not any(map(family, marks)), ORPHAN_SECONDS)
        print(f"nothing was left after {time.monotonic() - kill_time:.1f} s")
        for job_id in jobs:
            eventually((server.runs / job_id / "logs/attempt-2/shim.json").exists)
            client.cancel(job_id, now=True)
            client.wait(job_id, timeout=60)
            events = list(client.watch(job_id))
            history.watched(job_id, events)
            assert [e.attempt for e in events if e.state is JobState.PREPARING][:2] == [1, 2]
    history.check(server.runs, 3)


@pytest.mark.parametrize("clock", ["jumps", "fast"])
def test_clocks_that_run_wild(make_server: Callable[..., Server], clock: str) -> None:
    """The wall clock jumps by an hour at every read, or runs 60 times as fast: no timeout fires."""
    server, history = make_server(slots=2, clock=clock), History()
    start_time = time.monotonic()
    with DistillClient(server.address) as client:
        job = client.submit(job_config("pause=0.05 crash_at=5 crashes=1", 20))
        second_job = client.submit(job_config("pause=0.05 deaf=1", 1_000_000))
        for watched_job in (job, second_job):
            history.submitted("", watched_job.id)
        retried_job = client.wait(job.id, timeout=60)
        assert (retried_job.state, retried_job.attempt) == (JobState.SUCCEEDED, 2)
        eventually(lambda: client.get(second_job.id).step >= 3)
        client.cancel(second_job.id)
        # The jump of an hour did not end the grace period: the trainer wrote its checkpoint.
        cancelled_job = client.wait(second_job.id, timeout=60)
        assert (cancelled_job.state, cancelled_job.reason) == (
            JobState.CANCELLED,
            "cancelled on request",
        )
        for watched_job in (retried_job, cancelled_job):
            assert 0 < watched_job.ended_at - watched_job.started_at < time.monotonic() - start_time
            history.watched(watched_job.id, list(client.watch(watched_job.id)))
    history.check(server.runs, 2)

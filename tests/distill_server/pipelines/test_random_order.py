"""With random submits and ends, no job starts before its predecessors have succeeded."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from clients.jobs.job import TERMINAL, Job, JobState
from clients.runs.directory import Verdict
from distill_server.jobs.verdict import Policy
from distill_server.runners.interface import Exited
from distill_server.runners.machine import Machine
from tests.distill_server.pipelines.test_after import make_job, submit
from tests.distill_server.scripted_runner import SmallServer, small_server

JOBS = 12


def end_one(server: SmallServer, rng: random.Random) -> None:
    """End a random running attempt with a random verdict."""
    job_id, _ = rng.choice(sorted(server.runner.alive))
    verdict: Verdict = rng.choice(["succeeded", "succeeded", "succeeded", "failed"])
    server.runner.say(server.runs, job_id, verdict, code="INVALID_ARGUMENT")
    server.runner.end(job_id, Exited(0))


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 10))]
)
def test_no_job_is_early_and_none_is_forgotten(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    predecessors = {
        n: sorted(rng.sample(range(n), k=min(n, rng.randint(0, 2)))) for n in range(JOBS)
    }
    with small_server(tmp_path / "runs", Policy(Machine(slots=3), retries=0)) as server:
        jobs: list[Job] = []
        while len(jobs) < JOBS:
            names = [str(n) for n in range(len(jobs), min(JOBS, len(jobs) + rng.randint(1, 5)))]
            jobs += submit(
                server,
                *(
                    make_job(n, after=[str(predecessor) for predecessor in predecessors[int(n)]])
                    for n in names
                ),
            )

        def get_job(number: int) -> Job:
            return server.store.job(jobs[number].id)

        for _ in range(10 * JOBS):
            if rng.random() < 0.2:
                server.close()
                server.start()
            server.look()
            for number in range(JOBS):
                states = {get_job(predecessor).state for predecessor in predecessors[number]}
                if get_job(number).state in (
                    JobState.PREPARING,
                    JobState.RUNNING,
                    JobState.SUCCEEDED,
                ):
                    assert states <= {JobState.SUCCEEDED}
                elif get_job(number).state is JobState.QUEUED and states - {JobState.SUCCEEDED}:
                    assert get_job(number).phase.startswith("WAITING for ")
            if server.runner.alive:
                end_one(server, rng)
        server.look()
        for number in range(JOBS):
            all_succeeded = all(
                get_job(predecessor).state is JobState.SUCCEEDED
                for predecessor in predecessors[number]
            )
            end_states = (
                (JobState.SUCCEEDED, JobState.FAILED) if all_succeeded else (JobState.CANCELLED,)
            )
            assert get_job(number).state in TERMINAL
            assert get_job(number).state in end_states

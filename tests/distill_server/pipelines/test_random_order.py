"""However jobs come and end, none starts before those that it comes after."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from clients.jobs.job import TERMINAL, Job, JobState
from clients.runs.directory import Verdict
from distill_server.policy import Policy
from distill_server.runners.interface import Exited
from distill_server.runners.machine import Machine
from tests.distill_server.pipelines.test_after import made, submit
from tests.distill_server.scripted_runner import SmallServer, small_server

JOBS = 12


def end_one(server: SmallServer, chance: random.Random) -> None:
    """One of the attempts that run ends, in a way that is drawn."""
    job_id, _ = chance.choice(sorted(server.runner.alive))
    verdict: Verdict = chance.choice(["succeeded", "succeeded", "succeeded", "failed"])
    server.runner.say(server.runs, job_id, verdict, error="InvalidInput")
    server.runner.end(job_id, Exited(0))


@pytest.mark.parametrize("seed", range(10))
def test_no_job_is_early_and_none_is_forgotten(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    before = {
        n: sorted(chance.sample(range(n), k=min(n, chance.randint(0, 2)))) for n in range(JOBS)
    }
    with small_server(tmp_path / "runs", Policy(Machine(slots=3), retries=0)) as server:
        jobs: list[Job] = []
        while len(jobs) < JOBS:
            names = [str(n) for n in range(len(jobs), min(JOBS, len(jobs) + chance.randint(1, 5)))]
            jobs += submit(
                server, *(made(n, after=[str(other) for other in before[int(n)]]) for n in names)
            )

        def now(number: int) -> Job:
            return server.store.job(jobs[number].id)

        for _ in range(10 * JOBS):
            if chance.random() < 0.2:
                server.close()
                server.start()
            server.look()
            for number in range(JOBS):
                states = {now(other).state for other in before[number]}
                if now(number).state in (JobState.PREPARING, JobState.RUNNING, JobState.SUCCEEDED):
                    assert states <= {JobState.SUCCEEDED}
                elif now(number).state is JobState.QUEUED and states - {JobState.SUCCEEDED}:
                    assert now(number).phase.startswith("WAITING for ")
            if server.runner.alive:
                end_one(server, chance)
        server.look()
        for number in range(JOBS):
            good = all(now(other).state is JobState.SUCCEEDED for other in before[number])
            ends = (JobState.SUCCEEDED, JobState.FAILED) if good else (JobState.CANCELLED,)
            assert now(number).state in TERMINAL
            assert now(number).state in ends

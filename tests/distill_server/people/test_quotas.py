"""Quotas of owners: which jobs wait, with which phase, and which pass them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from clients.jobs.job import Job, JobState
from distill_server.jobs.store import ACTIVE
from distill_server.jobs.verdict import Policy
from distill_server.people.quotas import require_counted_gpus
from distill_server.runners.machine import Machine
from protos.auth.owners import Quota
from protos.errors import InvalidInput
from tests.distill_server.pipelines.test_after import end_job, make_job, stored_job
from tests.distill_server.scripted_runner import SmallServer, small_server


def submit(server: SmallServer, owner: str, name: str, gpus: int = 0, **change: object) -> Job:
    config = make_job(name, resources={"gpus": gpus}, **change).model_dump_json()
    return asyncio.run(server.control.submit_checked(config, "", "", owner))


def list_running(server: SmallServer) -> set[str]:
    return {job.name for job in server.store.in_state(*ACTIVE)}


def test_jobs_above_the_quota_wait_and_others_pass(tmp_path: Path) -> None:
    policy = Policy(Machine(slots=4))
    with small_server(tmp_path / "runs", policy, quotas={"ann": Quota(jobs=2)}) as server:
        jobs = {name: submit(server, "ann", name) for name in ("a1", "a2", "a3", "a4")}
        jobs |= {"b1": submit(server, "bob", "b1"), "c1": submit(server, "", "c1")}
        server.look()
        server.look()
        assert list_running(server) == {"a1", "a2", "b1", "c1"}
        waiting_phase = "WAITING quota: ann may run 2 jobs at once"
        assert [stored_job(server, jobs[name]).phase for name in ("a3", "a4")] == [
            waiting_phase,
            waiting_phase,
        ]
        server.close()
        server.start()
        end_job(server, jobs["a1"])
        assert list_running(server) == {"a2", "a3", "b1", "c1"}, "the quota holds over a restart"
        assert stored_job(server, jobs["a3"]).phase == "starting the trainer"
        assert stored_job(server, jobs["a4"]).phase == waiting_phase
        server.cancel(jobs["a4"].id, now=False)
        assert stored_job(server, jobs["a4"]).state is JobState.CANCELLED


def test_gpus_count_and_the_order_of_an_owner_is_kept(tmp_path: Path) -> None:
    policy = Policy(Machine(slots=9, gpus=tuple("01234567")))
    with small_server(tmp_path / "runs", policy, quotas={"ann": Quota(gpus=4)}) as server:
        first_job = submit(server, "ann", "first", gpus=3)
        large_job = submit(server, "ann", "large", gpus=2)
        small_job = submit(server, "ann", "small", gpus=1)
        submit(server, "bob", "other", gpus=4)
        for _ in range(3):
            server.look()
        assert list_running(server) == {"first", "other"}, "small is behind large"
        waiting_phase = "WAITING quota: ann may hold 4 GPUs at once"
        assert {stored_job(server, job).phase for job in (large_job, small_job)} == {waiting_phase}
        server.cancel(large_job.id, now=False)
        server.look()
        assert list_running(server) == {"first", "other", "small"}
        end_job(server, first_job)


def test_a_job_that_alone_exceeds_the_quota_is_refused(tmp_path: Path) -> None:
    policy = Policy(Machine(slots=9, gpus=tuple("01234567")))
    with small_server(tmp_path / "runs", policy, quotas={"ann": Quota(gpus=4)}) as server:
        refusal = r"resources\.gpus: the job requests 5 GPUs, but ann may hold 4 at once"
        config = make_job("never", resources={"gpus": 5}).model_dump_json()
        with pytest.raises(InvalidInput, match=refusal):
            submit(server, "ann", "never", gpus=5)
        with pytest.raises(InvalidInput, match=refusal):
            asyncio.run(server.control.check(config, owner="ann"))
        asyncio.run(server.control.check(config, owner="bob"))
        assert server.store.queue_length() == 0
        large_job = submit(server, "ann", "large", gpus=4)
        server.quotas = {"ann": Quota(gpus=3)}
        submit(server, "ann", "small", gpus=3)
        server.look()
        assert list_running(server) == {"small"}, "a job that can never start blocks no other"
        assert stored_job(server, large_job).phase == (
            "WAITING quota: the job requests 4 GPUs, but ann may hold 3 at once"
        )
        server.cancel(large_job.id, now=False)
        with pytest.raises(InvalidInput, match="the job requests 4 GPUs, but ann may hold 3"):
            server.control.resume(large_job.id, max_steps=0, from_step=0)


def test_a_job_above_the_quota_does_not_block_a_full_queue(tmp_path: Path) -> None:
    policy = Policy(Machine(slots=1))
    with small_server(tmp_path / "runs", policy, quotas={"ann": Quota(jobs=0)}) as server:
        for number in range(60):
            submit(server, "ann", f"a{number}", priority=9)
        bob_job = submit(server, "bob", "b")
        server.look()
        assert list_running(server) == {"b"}
        server.look()
        phases = [stored_job(server, job).phase for job in server.store.page(limit=100)]
        assert sum(phase.startswith("WAITING quota: ann may run 0") for phase in phases) == 60
        end_job(server, bob_job)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]
)
def test_no_quota_is_ever_exceeded_and_none_is_wasted(tmp_path: Path, seed: int) -> None:
    """Random jobs of three owners. A job waits only at the quota or behind a larger job."""
    rng = random.Random(seed)
    quotas: Mapping[str, Quota] = {"ann": Quota(2, 3), "bob": Quota(gpus=2)}
    policy = Policy(Machine(slots=6, gpus=tuple("012345")))
    with small_server(tmp_path / "runs", policy, quotas=quotas) as server:
        gpus_of: dict[str, int] = {}
        for number in range(60):
            owner, gpus = rng.choice(["ann", "bob", "eve"]), rng.randint(0, 2)
            gpus_of[submit(server, owner, f"j{number}", gpus=gpus).id] = gpus
            active = server.store.in_state(*ACTIVE)
            if active and rng.random() < 0.7:
                end_job(server, rng.choice(active))
            server.look()
            active = server.store.in_state(*ACTIVE)
            for name, quota in quotas.items():
                held_gpus = [gpus_of[job.id] for job in active if job.owner == name]
                assert quota.jobs is None or len(held_gpus) <= quota.jobs
                assert quota.gpus is None or sum(held_gpus) <= quota.gpus
        for _ in range(200):
            for job in server.store.in_state(*ACTIVE):
                end_job(server, job)
            server.look()
        assert not server.store.queue_length(), "every job had its turn"


def test_a_quota_of_gpus_needs_a_server_that_counts_them() -> None:
    require_counted_gpus({"ann": Quota(jobs=1)}, are_gpus_counted=False)
    require_counted_gpus({"ann": Quota(gpus=1)}, are_gpus_counted=True)
    with pytest.raises(InvalidInput, match=r"--gpus: owner ann has a quota of GPUs"):
        require_counted_gpus({"ann": Quota(gpus=1)}, are_gpus_counted=False)


def test_a_quota_that_changes_holds_for_the_next_start(tmp_path: Path) -> None:
    policy = Policy(Machine(slots=9))
    with small_server(tmp_path / "runs", policy, quotas={"ann": Quota(jobs=1)}) as server:
        for name in ("a1", "a2", "a3"):
            submit(server, "ann", name)
        for quotas, running_jobs in (
            ({"ann": Quota(jobs=1)}, {"a1"}),
            ({"ann": Quota(jobs=2)}, {"a1", "a2"}),
            ({"ann": Quota(jobs=1)}, {"a1", "a2"}),
            ({}, {"a1", "a2", "a3"}),
        ):
            server.quotas = quotas
            server.look()
            assert list_running(server) == running_jobs

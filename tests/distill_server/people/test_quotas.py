"""Quotas of owners: who waits, what the wait says, and that others pass."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from clients.jobs.job import Job, JobState
from distill_server.jobs.store import ACTIVE
from distill_server.people.quotas import require_counted_gpus
from distill_server.policy import Policy
from distill_server.runners.machine import Machine
from protos.auth.owners import Quota
from protos.errors import InvalidInput
from tests.distill_server.pipelines.test_after import end, made, now
from tests.distill_server.scripted_runner import SmallServer, small_server


def submit(server: SmallServer, owner: str, name: str, gpus: int = 0, **change: object) -> Job:
    config = made(name, resources={"gpus": gpus}, **change).model_dump_json()
    return asyncio.run(server.control.submit_checked(config, "", "", owner))


def running(server: SmallServer) -> set[str]:
    return {job.name for job in server.store.in_state(*ACTIVE)}


def test_jobs_above_the_quota_wait_and_others_pass(tmp_path: Path) -> None:
    policy = Policy(Machine(slots=4))
    with small_server(tmp_path / "runs", policy, quotas={"ann": Quota(jobs=2)}) as server:
        jobs = {name: submit(server, "ann", name) for name in ("a1", "a2", "a3", "a4")}
        jobs |= {"b1": submit(server, "bob", "b1"), "c1": submit(server, "", "c1")}
        server.look()
        server.look()
        assert running(server) == {"a1", "a2", "b1", "c1"}
        waits = "WAITING quota: ann may run 2 jobs at once"
        assert [now(server, jobs[name]).phase for name in ("a3", "a4")] == [waits, waits]
        server.close()
        server.start()
        end(server, jobs["a1"])
        assert running(server) == {"a2", "a3", "b1", "c1"}, "the quota holds over a restart"
        assert now(server, jobs["a3"]).phase == "starting the trainer"
        assert now(server, jobs["a4"]).phase == waits
        server.cancel(jobs["a4"].id, now=False)
        assert now(server, jobs["a4"]).state is JobState.CANCELLED


def test_gpus_count_and_the_order_of_an_owner_is_kept(tmp_path: Path) -> None:
    policy = Policy(Machine(slots=9, gpus=tuple("01234567")))
    with small_server(tmp_path / "runs", policy, quotas={"ann": Quota(gpus=4)}) as server:
        first = submit(server, "ann", "first", gpus=3)
        large = submit(server, "ann", "large", gpus=2)
        small = submit(server, "ann", "small", gpus=1)
        submit(server, "bob", "other", gpus=4)
        for _ in range(3):
            server.look()
        assert running(server) == {"first", "other"}, "small is behind large"
        waits = "WAITING quota: ann may hold 4 GPUs at once"
        assert {now(server, job).phase for job in (large, small)} == {waits}
        server.cancel(large.id, now=False)
        server.look()
        assert running(server) == {"first", "other", "small"}
        end(server, first)
        never = submit(server, "ann", "never", gpus=5)
        server.look()
        assert now(server, never).phase == waits, "not refused: the quota may be raised"


def test_a_job_above_the_quota_does_not_block_a_full_queue(tmp_path: Path) -> None:
    policy = Policy(Machine(slots=1))
    with small_server(tmp_path / "runs", policy, quotas={"ann": Quota(jobs=0)}) as server:
        for number in range(60):
            submit(server, "ann", f"a{number}", priority=9)
        bob = submit(server, "bob", "b")
        server.look()
        assert running(server) == {"b"}
        server.look()
        phases = [now(server, job).phase for job in server.store.page(limit=100)]
        assert sum(phase.startswith("WAITING quota: ann may run 0") for phase in phases) == 60
        end(server, bob)


@pytest.mark.parametrize("seed", range(6))
def test_no_quota_is_ever_exceeded_and_none_is_wasted(tmp_path: Path, seed: int) -> None:
    """Random jobs of three owners. An owner waits only at the quota, or behind a larger job."""
    draw = random.Random(seed)
    quotas: Mapping[str, Quota] = {"ann": Quota(2, 3), "bob": Quota(gpus=2)}
    policy = Policy(Machine(slots=6, gpus=tuple("012345")))
    with small_server(tmp_path / "runs", policy, quotas=quotas) as server:
        gpus_of: dict[str, int] = {}
        for number in range(60):
            owner, gpus = draw.choice(["ann", "bob", "eve"]), draw.randint(0, 2)
            gpus_of[submit(server, owner, f"j{number}", gpus=gpus).id] = gpus
            active = server.store.in_state(*ACTIVE)
            if active and draw.random() < 0.7:
                end(server, draw.choice(active))
            server.look()
            active = server.store.in_state(*ACTIVE)
            for name, quota in quotas.items():
                held = [gpus_of[job.id] for job in active if job.owner == name]
                assert quota.jobs is None or len(held) <= quota.jobs
                assert quota.gpus is None or sum(held) <= quota.gpus
        for _ in range(200):
            for job in server.store.in_state(*ACTIVE):
                end(server, job)
            server.look()
        assert not server.store.queue_length(), "every job had its turn"


def test_a_quota_of_gpus_needs_a_server_that_counts_them() -> None:
    require_counted_gpus({"ann": Quota(jobs=1)}, are_gpus_counted=False)
    require_counted_gpus({"ann": Quota(gpus=1)}, are_gpus_counted=True)
    with pytest.raises(InvalidInput, match=r"--gpus: owner ann has a quota of GPUs"):
        require_counted_gpus({"ann": Quota(gpus=1)}, are_gpus_counted=False)

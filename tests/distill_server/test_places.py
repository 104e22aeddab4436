"""The queue as the dashboard shows it: slots, places, and why each job waits."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from distill_server.places import Places
from distill_server.runners.interface import Exited
from distill_server.runners.machine import UNCOUNTED, Machine
from distill_server.scheduler import Policy
from protos.errors import Unavailable
from tests.distill_server.conftest import job_config
from tests.distill_server.scripted_runner import SmallServer, small_server

EIGHT_GPUS = Machine(slots=8, cpus_per_job=2, cpus=16, gpus=tuple("01234567"))


def submit(server: SmallServer, **changes: Any) -> str:
    config = job_config().model_dump() | changes
    return server.control.submit(json.dumps(config), "", "").id


def describe_places(server: SmallServer, *jobs: str) -> list[tuple[int, str]]:
    places = Places(server.store, server.scheduler, server.policy.machine)
    descriptions = [places.describe(server.store.job(job)) for job in jobs]
    assert all(not description["retry_at"] for description in descriptions)
    return [(description["place"], description["why"]) for description in descriptions]


def capacity(server: SmallServer) -> dict[str, Any]:
    return Places(server.store, server.scheduler, server.policy.machine).capacity()


def test_slots_and_priorities(tmp_path: Path) -> None:
    with small_server(tmp_path, Policy()) as server:
        first_id = submit(server)
        assert describe_places(server, first_id) == [(1, "the job starts next")]
        assert capacity(server) == {"slots": [0, 1], "cpus": [0, 1], "gpus": None, "queued": 1}
        server.look()
        later_id, sooner_id = submit(server), submit(server, priority=5)
        why = "the only slot is in use"
        assert describe_places(server, later_id, sooner_id) == [(2, why), (1, why)]
        assert capacity(server) == {"slots": [1, 1], "cpus": [1, 1], "gpus": None, "queued": 2}
        places = Places(server.store, server.scheduler, server.policy.machine)
        assert places.describe(server.store.job(first_id)) == {}
        assert places.phase_of(server.store.job(later_id)) == f"WAITING place 2: {why}"


def test_what_a_job_needs_and_who_is_before_it(tmp_path: Path) -> None:
    with small_server(tmp_path, Policy(EIGHT_GPUS)) as server:
        submit(server)
        server.look()
        large = submit(server, resources={"gpus": 8})
        wide = submit(server, resources={"gpus": 0, "cpus": 16})
        small = submit(server)
        server.look()
        assert describe_places(server, large, wide, small) == [
            (1, "the job needs 8 GPUs; 7 of 8 are free"),
            (2, "the job needs 16 CPU threads; 14 of 16 are free"),
            (3, f"{large} is before it"),
        ]
        assert capacity(server) == {"slots": [1, 8], "cpus": [2, 16], "gpus": [1, 8], "queued": 3}


def test_jobs_that_are_passed_over_hold_up_nobody(tmp_path: Path) -> None:
    """One job is too large for the restarted server, one waits for its teacher, one rests."""

    async def fail_preflight(config: object, run: Path) -> None:
        raise Unavailable("no teacher answers", field="teacher.address")

    with small_server(
        tmp_path, Policy(Machine(slots=3, cpus=8), backoff=60), fail_preflight
    ) as server:
        waiting_id, resting_id = submit(server), submit(server)
        server.look()
        server.runner.say(tmp_path, waiting_id, "failed", code="UNAVAILABLE")
        for job in (waiting_id, resting_id):
            server.runner.end(job, Exited(1))
        server.look()
        large, last_id = submit(server, resources={"cpus": 8}), submit(server)
        server.close()
        server.policy = Policy(Machine(slots=1, cpus=4), backoff=60, poll_every=60)
        server.start()
        server.scheduler.rest_seconds = lambda job: 50.0 if job.id == resting_id else 0.0  # type: ignore[method-assign]
        places = Places(server.store, server.scheduler, server.policy.machine)
        time_before = time.time()
        description = places.describe(server.store.job(resting_id))
        assert description["why"] == "the job waits after a failure"
        assert time_before + 49 <= description["retry_at"] <= time.time() + 51
        (place, why), (_, too_large), (last_place, next_why) = describe_places(
            server, waiting_id, large, last_id
        )
        assert (place, last_place, next_why) == (1, 4, "the job starts next")
        assert why.startswith("WAITING ")
        assert "the server has 4 for all jobs" in too_large


def test_many_jobs_before_a_job_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of the first jobs can start, and the server reads no more of them."""
    monkeypatch.setattr("distill_server.places._MAX_READ", 2)
    with small_server(tmp_path, Policy()) as server:
        *earlier_ids, last_id = (submit(server) for _ in range(4))
        monkeypatch.setattr(server.scheduler.waits, "is_waiting", lambda job: job.id in earlier_ids)
        assert describe_places(server, last_id) == [(4, "3 jobs are before it")]


def test_a_cluster_counts_its_own_threads(tmp_path: Path) -> None:
    with small_server(tmp_path, Policy(Machine(slots=2, cpus=UNCOUNTED))) as server:
        assert capacity(server)["cpus"] is None


def test_ten_thousand_queued_jobs_are_not_read(tmp_path: Path) -> None:
    with small_server(tmp_path, Policy(EIGHT_GPUS)) as server:
        submit(server)
        server.look()
        first_id = submit(server, resources={"gpus": 8})
        row = dict(
            server.store._db.execute("SELECT * FROM jobs WHERE id = ?", (first_id,)).fetchone()
        )
        rows = [{**row, "id": f"job-{n}", "number": n, "place": n} for n in range(3, 10_003)]
        names, marks = ", ".join(row), ", ".join(f":{name}" for name in row)
        server.store._db.executemany(f"INSERT INTO jobs ({names}) VALUES ({marks})", rows)
        read_ids: list[str] = []
        job = server.store.job
        server.store.job = lambda job_id: read_ids.append(job_id) or job(job_id)  # type: ignore
        places = Places(server.store, server.scheduler, server.policy.machine)
        assert places.describe(job("job-10002"))["place"] == 10_001
        assert len(read_ids) <= 100

"""Removal of jobs: what is refused, what goes, and what a killed server leaves to the next."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.jobs.job import Job, JobState
from distill_server.policy import Policy
from distill_server.retention import removals
from distill_server.retention.keeper import Keeper
from distill_server.retention.removals import Removals
from distill_server.runners.interface import Exited
from distill_server.runners.machine import Machine
from protos.errors import NotFound, WrongState
from protos.rpc import failpoints
from tests.distill_server.pipelines.test_after import capture, end, made, now, offline, submit
from tests.distill_server.scripted_runner import SmallServer, small_server

DAY = 24 * 3600.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SmallServer]:
    with small_server(tmp_path / "runs", Policy(Machine(slots=3))) as server:
        yield server


def removals_of(server: SmallServer) -> Removals:
    connection = server.store.dependencies._db
    return Removals(connection, server.store, server.runs, server.files, lambda job_id: None)


def left(server: SmallServer) -> dict[str, int]:
    connection = server.store.dependencies._db
    tables = ("jobs", "attempts", "events", "submissions", "dependencies", "removals")
    return {t: connection.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in tables}


def delete_files(server: SmallServer) -> None:
    asyncio.run(removals_of(server).delete_files())


def remove_all_of(server: SmallServer, job: Job) -> None:
    removals_of(server).remove(job.id)
    delete_files(server)


def ended(server: SmallServer, name: str) -> Job:
    (job,) = submit(server, made(name), keys=[f"key of {name}"])  # type: ignore[arg-type]
    server.look()
    end(server, job)
    assert now(server, job).state is JobState.SUCCEEDED
    return job


def test_all_of_a_job_goes(server: SmallServer) -> None:
    job = ended(server, "one")
    gone = removals_of(server).remove("on-policy-one")
    assert (gone.id, gone.state) == (job.id, JobState.SUCCEEDED)
    assert left(server) == dict.fromkeys(left(server), 0) | {"removals": 1}
    assert server.store.is_used(job.id), "no new job gets the id while files are deleted"
    with pytest.raises(NotFound):
        removals_of(server).remove(job.id)
    delete_files(server)
    assert not (server.runs / job.id).exists()
    assert left(server)["removals"] == 0
    assert not server.store.is_used(job.id)


def test_what_is_refused(server: SmallServer) -> None:
    rows, last = submit(server, capture("rows"), offline("last", "@rows/store"))
    server.look()
    with pytest.raises(WrongState, match=r"is PREPARING and cannot be removed; cancel it"):
        removals_of(server).remove(rows.id)
    (server.runs / rows.id / "store").mkdir()
    end(server, rows)
    for state in ("PREPARING", "CANCELLING"):
        with pytest.raises(WrongState, match=f"is needed by job {last.id}, which is {state}"):
            removals_of(server).remove(rows.id)
        server.cancel(last.id, now=True)
    end(server, last, "cancelled")
    removals_of(server).pin(rows.id, pinned=True)
    with pytest.raises(WrongState, match=f"is pinned; distill pin --off {rows.id}"):
        removals_of(server).remove(rows.id)
    assert (server.runs / rows.id).is_dir()
    removals_of(server).pin(rows.id, pinned=False)
    removals_of(server).remove(rows.id)
    with pytest.raises(WrongState, match=f"job {rows.id}, whose store it reads, was removed"):
        asyncio.run(server.control.resume_checked(last.id, max_steps=0, from_step=0))


def test_a_job_that_waited_is_removed_in_its_wait(server: SmallServer) -> None:
    """It waits for a teacher and is cancelled; the scheduler still has its next try."""
    (job,) = submit(server, made("one"))
    server.look()
    server.runner.say(server.runs, job.id, "failed", error="Unavailable")
    server.runner.end(job.id, Exited(4))
    server.look()
    assert now(server, job).phase.startswith("WAITING")
    server.cancel(job.id, now=True)
    removals_of(server).remove(job.id)
    for wait in server.scheduler.waits._waits.values():
        wait.next_at = 0.0
    server.look()
    assert not len(server.scheduler.waits)


@pytest.mark.parametrize("point", ["removal-stored", "files-deleted"])
def test_a_killed_server_leaves_the_rest_to_the_next(server: SmallServer, point: str) -> None:
    one, other = ended(server, "one"), ended(server, "other")
    failpoints.arm(f"{point}:raise")
    try:
        with pytest.raises(OSError, match=point):
            remove_all_of(server, one)
    finally:
        failpoints.arm("")
    assert (server.runs / one.id).exists() == (point == "removal-stored")
    server.close()
    server.start()
    with pytest.raises(NotFound):
        server.store.job(one.id)
    asyncio.run(Keeper(removals_of(server), None, server.store.now).run_once())
    assert not (server.runs / one.id).exists()
    assert left(server)["removals"] == 0
    assert (server.runs / other.id / "job.json").exists()


def test_nothing_outside_is_deleted(server: SmallServer, tmp_path: Path) -> None:
    """Links in a run directory, and one in its place, lead to what is not the server's."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "model").write_text("weights")
    one, two = ended(server, "one"), ended(server, "two")
    (server.runs / one.id / "data").symlink_to(outside)
    shutil.rmtree(server.runs / two.id)
    (server.runs / two.id).symlink_to(outside)
    for job in (one, two):
        removals_of(server).remove(job.id)
    delete_files(server)
    assert not any(os.path.lexists(server.runs / job.id) for job in (one, two))
    assert (outside / "model").read_text() == "weights"
    with pytest.raises(AssertionError):
        removals.delete_run(server.runs, "../outside")


def test_what_cannot_be_deleted_is_tried_again(
    server: SmallServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = ended(server, "one"), ended(server, "two")

    def broken(runs: Path, job_id: str) -> None:
        if job_id == one.id:
            raise OSError("broken")
        delete(runs, job_id)

    delete = removals.delete_run
    for job in (one, two):
        removals_of(server).remove(job.id)
    monkeypatch.setattr(removals, "delete_run", broken)
    delete_files(server)
    assert (left(server)["removals"], (server.runs / two.id).exists()) == (1, False)
    monkeypatch.undo()
    delete_files(server)
    assert not (server.runs / one.id).exists()


def test_jobs_expire(server: SmallServer) -> None:
    """Those that ended long ago, but for the pinned ones and those that others need."""
    jobs = {name: ended(server, name) for name in ("old", "pinned", "needed")}
    removals_of(server).pin(jobs["pinned"].id, pinned=True)
    (waiting,) = submit(server, made("waiting", after=["needed"]))
    server.look()
    day = server.store.now()
    asyncio.run(Keeper(removals_of(server), 1.0, lambda: day + DAY / 2).run_once())
    assert len(server.store.page(limit=9)) == 4
    asyncio.run(Keeper(removals_of(server), None, lambda: day + 9 * DAY).run_once())
    assert len(server.store.page(limit=9)) == 4
    asyncio.run(Keeper(removals_of(server), 1.0, lambda: day + 2 * DAY).run_once())
    assert {job.name for job in server.store.page(limit=9)} == {"pinned", "needed", "waiting"}
    assert not (server.runs / jobs["old"].id).exists()
    end(server, waiting)
    asyncio.run(Keeper(removals_of(server), 1.0, lambda: day + 2 * DAY).run_once())
    assert [job.name for job in server.store.page(limit=9)] == ["pinned"]
    assert {path.name for path in server.runs.glob("on-policy-*")} == {jobs["pinned"].id}

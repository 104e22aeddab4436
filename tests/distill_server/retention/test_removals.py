"""Removal of jobs: refusals, deletion, and what the next server completes after a kill."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.jobs.job import Job, JobState
from distill_server.jobs.verdict import Policy
from distill_server.retention import removals
from distill_server.retention.keeper import Keeper
from distill_server.retention.removals import Removals
from distill_server.runners.interface import Exited
from distill_server.runners.machine import Machine
from protos.errors import NotFound, WrongState
from protos.rpc import failpoints
from tests.distill_server.pipelines.test_after import (
    end_job,
    make_capture_job,
    make_job,
    make_offline_job,
    stored_job,
    submit,
)
from tests.distill_server.scripted_runner import SmallServer, small_server

DAY = 24 * 3600.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SmallServer]:
    with small_server(tmp_path / "runs", Policy(Machine(slots=3))) as server:
        yield server


def removals_of(server: SmallServer) -> Removals:
    connection = server.store.dependencies._db
    return Removals(connection, server.store, server.runs, server.files, lambda job_id: None)


def count_rows(server: SmallServer) -> dict[str, int]:
    connection = server.store.dependencies._db
    tables = ("jobs", "attempts", "events", "submissions", "dependencies", "removals")
    return {t: connection.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in tables}


def delete_files(server: SmallServer) -> None:
    asyncio.run(removals_of(server).delete_files())


def remove_all_of(server: SmallServer, job: Job) -> None:
    removals_of(server).remove(job.id)
    delete_files(server)


def end_new_job(server: SmallServer, name: str) -> Job:
    (job,) = submit(server, make_job(name), keys=[f"key of {name}"])  # type: ignore[arg-type]
    server.look()
    end_job(server, job)
    assert stored_job(server, job).state is JobState.SUCCEEDED
    return job


def test_all_of_a_job_goes(server: SmallServer) -> None:
    job = end_new_job(server, "one")
    removed_job = removals_of(server).remove("on-policy-one")
    assert (removed_job.id, removed_job.state) == (job.id, JobState.SUCCEEDED)
    assert count_rows(server) == dict.fromkeys(count_rows(server), 0) | {"removals": 1}
    assert server.store.is_used(job.id), "no new job gets the id while files are deleted"
    with pytest.raises(NotFound):
        removals_of(server).remove(job.id)
    delete_files(server)
    assert not (server.runs / job.id).exists()
    assert count_rows(server)["removals"] == 0
    assert not server.store.is_used(job.id)


def test_what_is_refused(server: SmallServer) -> None:
    capture_job, last_job = submit(
        server, make_capture_job("rows"), make_offline_job("last", "@rows/store")
    )
    server.look()
    with pytest.raises(WrongState, match=r"is PREPARING and cannot be removed; cancel the job"):
        removals_of(server).remove(capture_job.id)
    (server.runs / capture_job.id / "store").mkdir()
    end_job(server, capture_job)
    for state in ("PREPARING", "CANCELLING"):
        with pytest.raises(WrongState, match=f"is needed by job {last_job.id}, which is {state}"):
            removals_of(server).remove(capture_job.id)
        server.cancel(last_job.id, now=True)
    end_job(server, last_job, "cancelled")
    removals_of(server).pin(capture_job.id, pinned=True)
    with pytest.raises(WrongState, match=f"is pinned; distill pin --off {capture_job.id}"):
        removals_of(server).remove(capture_job.id)
    assert (server.runs / capture_job.id).is_dir()
    removals_of(server).pin(capture_job.id, pinned=False)
    removals_of(server).remove(capture_job.id)
    with pytest.raises(
        WrongState, match=f"reads the store of job {capture_job.id}, which was removed"
    ):
        asyncio.run(server.control.resume_checked(last_job.id, max_steps=0, from_step=0))


def test_a_job_that_waited_is_removed_in_its_wait(server: SmallServer) -> None:
    """A job that waited for a teacher is cancelled and removed while its next try is scheduled."""
    (job,) = submit(server, make_job("one"))
    server.look()
    server.runner.say(server.runs, job.id, "failed", code="UNAVAILABLE")
    server.runner.end(job.id, Exited(4))
    server.look()
    assert stored_job(server, job).phase.startswith("WAITING")
    server.cancel(job.id, now=True)
    removals_of(server).remove(job.id)
    for wait in server.scheduler.waits._waits.values():
        wait.next_at = 0.0
    server.look()
    assert not len(server.scheduler.waits)


@pytest.mark.parametrize("point", ["removal-stored", "files-deleted"])
def test_a_killed_server_leaves_the_rest_to_the_next(server: SmallServer, point: str) -> None:
    removed_job, other_job = end_new_job(server, "one"), end_new_job(server, "other")
    failpoints.arm(f"{point}:raise")
    try:
        with pytest.raises(OSError, match=point):
            remove_all_of(server, removed_job)
    finally:
        failpoints.arm("")
    assert (server.runs / removed_job.id).exists() == (point == "removal-stored")
    server.close()
    server.start()
    with pytest.raises(NotFound):
        server.store.job(removed_job.id)
    asyncio.run(Keeper(removals_of(server), None, server.store.now).run_once())
    assert not (server.runs / removed_job.id).exists()
    assert count_rows(server)["removals"] == 0
    assert (server.runs / other_job.id / "job.json").exists()


def test_nothing_outside_is_deleted(server: SmallServer, tmp_path: Path) -> None:
    """Symbolic links inside a run directory, and one in its place, are not followed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "model").write_text("weights")
    linked_job, replaced_job = end_new_job(server, "one"), end_new_job(server, "two")
    (server.runs / linked_job.id / "data").symlink_to(outside)
    shutil.rmtree(server.runs / replaced_job.id)
    (server.runs / replaced_job.id).symlink_to(outside)
    for job in (linked_job, replaced_job):
        removals_of(server).remove(job.id)
    delete_files(server)
    assert not any(os.path.lexists(server.runs / job.id) for job in (linked_job, replaced_job))
    assert (outside / "model").read_text() == "weights"
    with pytest.raises(AssertionError):
        removals.delete_run(server.runs, "../outside")


def test_what_cannot_be_deleted_is_tried_again(
    server: SmallServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck_job, other_job = end_new_job(server, "one"), end_new_job(server, "two")

    def fail_deletion(runs: Path, job_id: str) -> None:
        if job_id == stuck_job.id:
            raise OSError("broken")
        delete_run(runs, job_id)

    delete_run = removals.delete_run
    for job in (stuck_job, other_job):
        removals_of(server).remove(job.id)
    monkeypatch.setattr(removals, "delete_run", fail_deletion)
    delete_files(server)
    assert (count_rows(server)["removals"], (server.runs / other_job.id).exists()) == (1, False)
    monkeypatch.undo()
    delete_files(server)
    assert not (server.runs / stuck_job.id).exists()


def test_jobs_expire(server: SmallServer) -> None:
    """Jobs that ended long ago expire, except pinned jobs and jobs that others need."""
    jobs = {name: end_new_job(server, name) for name in ("old", "pinned", "needed")}
    removals_of(server).pin(jobs["pinned"].id, pinned=True)
    (waiting,) = submit(server, make_job("waiting", after=["needed"]))
    server.look()
    day = server.store.now()
    asyncio.run(Keeper(removals_of(server), 1.0, lambda: day + DAY / 2).run_once())
    assert len(server.store.page(limit=9)) == 4
    asyncio.run(Keeper(removals_of(server), None, lambda: day + 9 * DAY).run_once())
    assert len(server.store.page(limit=9)) == 4
    asyncio.run(Keeper(removals_of(server), 1.0, lambda: day + 2 * DAY).run_once())
    assert {job.name for job in server.store.page(limit=9)} == {"pinned", "needed", "waiting"}
    assert not (server.runs / jobs["old"].id).exists()
    end_job(server, waiting)
    asyncio.run(Keeper(removals_of(server), 1.0, lambda: day + 2 * DAY).run_once())
    assert [job.name for job in server.store.page(limit=9)] == ["pinned"]
    assert {path.name for path in server.runs.glob("on-policy-*")} == {jobs["pinned"].id}

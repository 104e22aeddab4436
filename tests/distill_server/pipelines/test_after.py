"""Jobs that come after others: they wait, say so, read what the others wrote, or do not start."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.config.capture import CaptureJob
from clients.config.evaluation import EvalJob
from clients.config.kinds import AnyJob, parse_job
from clients.jobs.job import Job, JobState
from clients.runs.directory import RunDirectory
from distill_server.jobs.control import JobControl
from distill_server.policy import Policy
from distill_server.runners.interface import Exited
from distill_server.runners.machine import Machine
from protos.errors import DistillError, InvalidInput, NotFound, Overloaded, Unavailable, WrongState
from tests.distill_server.conftest import job_config
from tests.distill_server.scripted_runner import SmallServer, small_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SmallServer]:
    with small_server(tmp_path / "runs", Policy(Machine(slots=3), max_queued=6)) as server:
        yield server


def made(name: str, **change: Any) -> AnyJob:
    return parse_job(json.dumps(job_config(name).model_dump() | change))


def capture(name: str) -> AnyJob:
    return CaptureJob.model_validate(
        {"name": name, "data": {"path": "x"}, "method": {"type": "capture"}}
    )


def offline(name: str, path: str, **change: Any) -> AnyJob:
    values = {"name": name, "student": {"model": "tiny"}, "data": {"path": path}}
    return parse_job(json.dumps({**values, "method": {"type": "offline"}, **change}))


def evaluation(name: str, **change: Any) -> AnyJob:
    values = {"name": name, "student": {"model": "tiny"}, "data": {"path": "x"}}
    values |= {"method": {"type": "eval"}, "reward": {"type": "exact_match"}}
    return EvalJob.model_validate(values | change)


def submit(server: SmallServer, *configs: AnyJob, keys: str = "") -> list[Job]:
    return asyncio.run(submitted(server.control, *configs, keys=keys))


async def submitted(control: JobControl, *configs: AnyJob, keys: str = "") -> list[Job]:
    named = zip(configs, keys or [""] * len(configs), strict=True)
    return await control.submit_all([(one.model_dump_json(), "", key) for one, key in named])


def now(server: SmallServer, job: Job) -> Job:
    return server.store.job(job.id)


def end(server: SmallServer, job: Job, verdict: Any = "succeeded") -> None:
    server.runner.say(server.runs, job.id, verdict, error="InvalidInput")
    server.runner.end(job.id, Exited(0))
    server.look()


def test_a_job_waits_for_those_before_it(server: SmallServer) -> None:
    first, second = submit(server, made("first"), made("second"))
    (last,) = submit(server, made("last", after=["first", second.id]))
    (other,) = submit(server, made("other"))
    server.look()
    assert now(server, last).phase == f"WAITING for {first.id}, {second.id}"
    assert now(server, other).state is JobState.PREPARING, "it is not held up"
    end(server, second)
    assert now(server, last).phase == f"WAITING for {first.id}"
    server.close()
    server.start()
    server.look()
    assert now(server, last).state is JobState.QUEUED
    end(server, first)
    assert (now(server, last).state, now(server, last).phase) == (
        JobState.PREPARING,
        "starting the trainer",
    )


@pytest.mark.parametrize("verdict", ["failed", "cancelled"])
def test_what_cannot_start_ends_and_is_resumed_behind_the_first(
    server: SmallServer, verdict: str
) -> None:
    first, second, third = submit(server, made("1"), made("2", after=["1"]), made("3", after=["2"]))
    server.look()
    if verdict == "failed":
        end(server, first, "failed")
    else:
        server.cancel(first.id, now=True)
        end(server, first, "cancelled")
    server.look()
    state = verdict.upper()
    assert now(server, second).state is JobState.CANCELLED
    why = f"job {first.id}, which must succeed first, is {state}"
    assert now(server, second).reason == why
    assert now(server, third).reason.endswith("is CANCELLED")
    for job in (third, second):
        with pytest.raises(WrongState, match=r"must succeed first.*resume that job first"):
            server.control.resume(job.id, max_steps=0, from_step=0)
    with pytest.raises(WrongState, match=f"after: job {first.id}.*distill resume"):
        submit(server, made("4", after=["1"]))
    for job in (first, second, third):
        server.control.resume(job.id, max_steps=0, from_step=0)
    server.look()
    assert now(server, third).phase == f"WAITING for {second.id}"
    for job in (first, second, third):
        end(server, job)
        server.look()
        assert now(server, job).state is JobState.SUCCEEDED


def test_outputs_become_paths_when_the_job_starts(server: SmallServer) -> None:
    rows, warm, last = submit(
        server,
        capture("rows 1"),
        made("warm"),
        offline("last", "@rows 1/store", student={"model": "@warm/export"}),
    )
    stored = parse_job(now(server, last).config_json).model_dump()
    assert stored["data"]["path"] == f"@{rows.id}/store"
    server.look()
    for job, name in ((rows, "store"), (warm, "export")):
        (server.runs / job.id / name).mkdir()
        end(server, job)
    assert now(server, last).state is JobState.PREPARING
    told: Any = RunDirectory(server.runs / last.id).config()
    assert told.data.path == str(server.runs / rows.id / "store")
    assert told.student.model == str(server.runs / warm.id / "export")


def test_an_output_that_was_removed_fails_the_job(server: SmallServer) -> None:
    warm, last = submit(server, made("warm"), made("last", student={"model": "@warm/export"}))
    server.look()
    end(server, warm)
    server.look()
    assert now(server, last).state is JobState.FAILED
    assert f"the export directory of job {warm.id} was removed" in now(server, last).reason


@pytest.mark.parametrize(
    ("job", "error", "text"),
    [
        (made("x", after=["nobody"]), NotFound, "no job 'nobody'"),
        (made("x", after=["x"]), NotFound, "after: job 'x': no job 'x'"),
        (made("x", after=["below"]), InvalidInput, "job 'below' is not above 'x'"),
        (
            made("x", student={"model": "@rows/export"}),
            InvalidInput,
            r"student.model: job 'x': job capture-rows-\w+ is of method capture: it has a store",
        ),
        (offline("x", "@warm/store"), InvalidInput, "it has an export, and no store"),
        (
            made("x", student={"model": "@exam/export"}),
            InvalidInput,
            r"student.model: job 'x': job eval-exam-\w+ is of method eval: it has no export",
        ),
        (
            evaluation("x", reward={"type": "python", "file": "/reward.py"}),
            InvalidInput,
            "reward.file: a server runs no code",
        ),
    ],
)
def test_refused_at_submission(
    server: SmallServer, job: AnyJob, error: type[DistillError], text: str
) -> None:
    submit(server, capture("rows"), made("warm"), evaluation("exam"))
    with pytest.raises(error) as caught:
        submit(server, job, made("below"))
    assert re.search(text, str(caught.value)), str(caught.value)
    assert len(server.store.page(limit=9)) == len(list(server.runs.glob("*-*-*"))) == 3


def test_all_of_a_file_or_none(server: SmallServer) -> None:
    jobs = [made(str(number)) for number in range(7)]
    with pytest.raises(Overloaded, match="the queue is full"):
        submit(server, *jobs)
    assert not server.store.page(limit=9)
    with pytest.raises(InvalidInput, match="CPU threads"):
        submit(server, *jobs[:2], made("large", resources={"cpus": 4000}))
    assert not server.store.page(limit=9)
    first = submit(server, *jobs[:3], keys="abc")
    again = submit(server, *jobs[:3], keys="abc")
    assert [job.id for job in again] == [job.id for job in first]
    with pytest.raises(InvalidInput, match="this key was already used"):
        submit(server, *jobs[:4], keys="abcd")
    assert len(server.store.page(limit=9)) == 3


def test_a_full_database_queues_none(server: SmallServer) -> None:
    submit(server, made("x"))
    database: Any = server.store
    pages = database._db.execute("PRAGMA page_count").fetchone()[0]
    database._db.execute(f"PRAGMA max_page_count = {pages}")
    large = {"model": "x" * 3000}
    with pytest.raises(Unavailable, match="full"):
        submit(server, *(made(str(number), student=large) for number in range(5)))
    assert len(server.store.page(limit=9)) == len(list(server.runs.glob("on-policy-*"))) == 1


def test_the_newest_job_of_a_name(server: SmallServer) -> None:
    submit(server, made("warm"))
    (newest,) = submit(server, made("warm"))
    (last,) = submit(server, made("last", after=["warm"]))
    assert parse_job(now(server, last).config_json).after == (newest.id,)

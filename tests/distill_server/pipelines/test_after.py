"""Jobs with `after`: they wait, read the outputs of other jobs, or are cancelled."""

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
from distill_server.jobs.verdict import Policy
from distill_server.runners.interface import Exited
from distill_server.runners.machine import Machine
from protos.errors import DistillError, InvalidInput, NotFound, Overloaded, Unavailable, WrongState
from tests.distill_server.conftest import job_config
from tests.distill_server.scripted_runner import SmallServer, small_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SmallServer]:
    with small_server(tmp_path / "runs", Policy(Machine(slots=3), max_queued=6)) as server:
        yield server


def make_job(name: str, **change: Any) -> AnyJob:
    return parse_job(json.dumps(job_config(name).model_dump() | change))


def make_capture_job(name: str) -> AnyJob:
    return CaptureJob.model_validate(
        {"name": name, "data": {"path": "x"}, "method": {"type": "capture"}}
    )


def make_offline_job(name: str, path: str, **change: Any) -> AnyJob:
    values = {"name": name, "student": {"model": "tiny"}, "data": {"path": path}}
    return parse_job(json.dumps({**values, "method": {"type": "offline"}, **change}))


def make_eval_job(name: str, **change: Any) -> AnyJob:
    values = {"name": name, "student": {"model": "tiny"}, "data": {"path": "x"}}
    values |= {"method": {"type": "eval"}, "reward": {"type": "exact_match"}}
    return EvalJob.model_validate(values | change)


def submit(server: SmallServer, *configs: AnyJob, keys: str = "") -> list[Job]:
    return asyncio.run(submit_configs(server.control, *configs, keys=keys))


async def submit_configs(control: JobControl, *configs: AnyJob, keys: str = "") -> list[Job]:
    keyed_configs = zip(configs, keys or [""] * len(configs), strict=True)
    return await control.submit_all(
        [(config.model_dump_json(), "", key) for config, key in keyed_configs]
    )


def stored_job(server: SmallServer, job: Job) -> Job:
    return server.store.job(job.id)


def end_job(server: SmallServer, job: Job, verdict: Any = "succeeded") -> None:
    server.runner.say(server.runs, job.id, verdict, code="INVALID_ARGUMENT")
    server.runner.end(job.id, Exited(0))
    server.look()


def test_a_job_waits_for_those_before_it(server: SmallServer) -> None:
    first_job, second_job = submit(server, make_job("first"), make_job("second"))
    (last_job,) = submit(server, make_job("last", after=["first", second_job.id]))
    (other_job,) = submit(server, make_job("other"))
    server.look()
    assert stored_job(server, last_job).phase == f"WAITING for {first_job.id}, {second_job.id}"
    assert stored_job(server, other_job).state is JobState.PREPARING, "it is not held up"
    end_job(server, second_job)
    assert stored_job(server, last_job).phase == f"WAITING for {first_job.id}"
    server.close()
    server.start()
    server.look()
    assert stored_job(server, last_job).state is JobState.QUEUED
    end_job(server, first_job)
    assert (stored_job(server, last_job).state, stored_job(server, last_job).phase) == (
        JobState.PREPARING,
        "starting the trainer",
    )


@pytest.mark.parametrize("verdict", ["failed", "cancelled"])
def test_what_cannot_start_ends_and_is_resumed_behind_the_first(
    server: SmallServer, verdict: str
) -> None:
    first_job, second_job, third_job = submit(
        server, make_job("1"), make_job("2", after=["1"]), make_job("3", after=["2"])
    )
    server.look()
    if verdict == "failed":
        end_job(server, first_job, "failed")
    else:
        server.cancel(first_job.id, now=True)
        end_job(server, first_job, "cancelled")
    server.look()
    state = verdict.upper()
    assert stored_job(server, second_job).state is JobState.CANCELLED
    reason = f"job {first_job.id}, which must succeed first, is {state}"
    assert stored_job(server, second_job).reason == reason
    assert stored_job(server, third_job).reason.endswith("is CANCELLED")
    for job in (third_job, second_job):
        with pytest.raises(WrongState, match=r"must succeed first.*resume that job first"):
            server.control.resume(job.id, max_steps=0, from_step=0)
    with pytest.raises(WrongState, match=f"after: job {first_job.id}.*distill resume"):
        submit(server, make_job("4", after=["1"]))
    for job in (first_job, second_job, third_job):
        server.control.resume(job.id, max_steps=0, from_step=0)
    server.look()
    assert stored_job(server, third_job).phase == f"WAITING for {second_job.id}"
    for job in (first_job, second_job, third_job):
        end_job(server, job)
        server.look()
        assert stored_job(server, job).state is JobState.SUCCEEDED


def test_a_failed_job_is_replaced_in_its_pipeline(server: SmallServer) -> None:
    """The file is sent again without the jobs that have SUCCEEDED, and with another job 2."""
    student = {"model": "@2/export"}
    first_job, failed_job, cancelled_job = submit(
        server,
        make_job("1"),
        make_job("2", after=["1"]),
        make_job("3", student=student),
    )
    server.look()
    end_job(server, first_job)
    end_job(server, failed_job, "failed")
    server.look()
    assert stored_job(server, cancelled_job).state is JobState.CANCELLED
    new_job, last_job = submit(
        server, make_job("2", after=["1"], max_steps=5), make_job("3", student=student)
    )
    server.look()
    (server.runs / new_job.id / "export").mkdir()
    end_job(server, new_job)
    end_job(server, last_job)
    assert stored_job(server, last_job).state is JobState.SUCCEEDED
    config = RunDirectory(server.runs / last_job.id).config()
    assert config.student is not None
    assert config.student.model == str(server.runs / new_job.id / "export")


def test_the_jobs_of_a_pipeline(server: SmallServer) -> None:
    """Two branches after a capture, which join; another job is no part of them."""
    configs = [
        make_capture_job("rows"),
        make_offline_job("left", "@rows/store"),
        make_offline_job("right", "@rows/store"),
        make_eval_job("join", student={"model": "@left/export"}, after=["right"]),
        make_job("alone"),
    ]
    rows, left, right, join, alone = (job.id for job in submit(server, *configs))
    expected = {rows: [], left: [rows], right: [rows], join: sorted([left, right])}
    for job_id in expected:
        pipeline = server.store.dependencies.pipeline_of(job_id, 9)
        assert {part: sorted(before) for part, before in pipeline.items()} == expected
        assert list(pipeline) == list(expected), "in order of submission"
    assert server.store.dependencies.pipeline_of(alone, 9) == {alone: []}
    assert list(server.store.dependencies.pipeline_of(join, 2)) == [rows, left]


def test_outputs_become_paths_when_the_job_starts(server: SmallServer) -> None:
    capture_job, warm_job, last_job = submit(
        server,
        make_capture_job("rows 1"),
        make_job("warm"),
        make_offline_job("last", "@rows 1/store", student={"model": "@warm/export"}),
    )
    stored_config = parse_job(stored_job(server, last_job).config_json).model_dump()
    assert stored_config["data"]["path"] == f"@{capture_job.id}/store"
    server.look()
    for job, name in ((capture_job, "store"), (warm_job, "export")):
        (server.runs / job.id / name).mkdir()
        end_job(server, job)
    assert stored_job(server, last_job).state is JobState.PREPARING
    started_config: Any = RunDirectory(server.runs / last_job.id).config()
    assert started_config.data.path == str(server.runs / capture_job.id / "store")
    assert started_config.student.model == str(server.runs / warm_job.id / "export")


def test_an_output_that_was_removed_fails_the_job(server: SmallServer) -> None:
    warm_job, last_job = submit(
        server, make_job("warm"), make_job("last", student={"model": "@warm/export"})
    )
    server.look()
    end_job(server, warm_job)
    server.look()
    assert stored_job(server, last_job).state is JobState.FAILED
    assert (
        f"the export directory of job {warm_job.id} was removed"
        in stored_job(server, last_job).reason
    )


@pytest.mark.parametrize(
    ("job", "error", "text"),
    [
        (make_job("x", after=["nobody"]), NotFound, "no job 'nobody'"),
        (make_job("x", after=["x"]), NotFound, "after: job 'x': no job 'x'"),
        (make_job("x", after=["below"]), InvalidInput, "job 'below' is not above 'x'"),
        (
            make_job("x", student={"model": "@rows/export"}),
            InvalidInput,
            r"student.model: job 'x': job capture-rows-\w+ is of method capture: it has a store",
        ),
        (make_offline_job("x", "@warm/store"), InvalidInput, "it has an export, and no store"),
        (
            make_job("x", student={"model": "@exam/export"}),
            InvalidInput,
            r"student.model: job 'x': job eval-exam-\w+ is of method eval: it has no export",
        ),
        (
            make_eval_job("x", reward={"type": "python", "file": "/reward.py"}),
            InvalidInput,
            "reward.file: a server does not run the code",
        ),
    ],
)
def test_refused_at_submission(
    server: SmallServer, job: AnyJob, error: type[DistillError], text: str
) -> None:
    submit(server, make_capture_job("rows"), make_job("warm"), make_eval_job("exam"))
    with pytest.raises(error) as exc_info:
        submit(server, job, make_job("below"))
    assert re.search(text, str(exc_info.value)), str(exc_info.value)
    assert len(server.store.page(limit=9)) == len(list(server.runs.glob("*-*-*"))) == 3


def test_all_of_a_file_or_none(server: SmallServer) -> None:
    jobs = [make_job(str(number)) for number in range(7)]
    with pytest.raises(Overloaded, match="the queue is full"):
        submit(server, *jobs)
    assert not server.store.page(limit=9)
    with pytest.raises(InvalidInput, match="CPU threads"):
        submit(server, *jobs[:2], make_job("large", resources={"cpus": 4000}))
    assert not server.store.page(limit=9)
    first_jobs = submit(server, *jobs[:3], keys="abc")
    repeated_jobs = submit(server, *jobs[:3], keys="abc")
    assert [job.id for job in repeated_jobs] == [job.id for job in first_jobs]
    with pytest.raises(InvalidInput, match="this key was already used"):
        submit(server, *jobs[:4], keys="abcd")
    assert len(server.store.page(limit=9)) == 3


def test_a_full_database_queues_none(server: SmallServer) -> None:
    submit(server, make_job("x"))
    database: Any = server.store
    pages = database._db.execute("PRAGMA page_count").fetchone()[0]
    database._db.execute(f"PRAGMA max_page_count = {pages}")
    large = {"model": "x" * 3000}
    with pytest.raises(Unavailable, match="full"):
        submit(server, *(make_job(str(number), student=large) for number in range(5)))
    assert len(server.store.page(limit=9)) == len(list(server.runs.glob("on-policy-*"))) == 1


def test_the_newest_job_of_a_name(server: SmallServer) -> None:
    submit(server, make_job("warm"))
    (newest_job,) = submit(server, make_job("warm"))
    (last_job,) = submit(server, make_job("last", after=["warm"]))
    assert parse_job(stored_job(server, last_job).config_json).after == (newest_job.id,)

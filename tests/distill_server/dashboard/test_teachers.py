"""The records of teachers that this server starts and that do not answer yet."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from clients.config.on_policy import OnPolicyJob, OnPolicyTeacher
from clients.config.tables.common import StudentConfig
from clients.config.tables.data import DataConfig
from clients.jobs.job import JobState
from clients.runs.directory import RunDirectory
from distill_server.dashboard.teachers import Teachers
from distill_server.jobs.rows import NewJob
from distill_server.jobs.store import Change
from distill_server.jobs.verdict import Policy
from distill_server.runners.machine import Machine, Share
from distill_server.teachers.home import Record
from distill_server.teachers.started import TeacherProcess
from tests.distill_server.scripted_runner import SmallServer, small_server


def make_process(key: str, **values: str | bool) -> TeacherProcess:
    record = Record({"model": f"org/{key}"}, attempt=3, port=0, gpus=("0", "1"))
    return TeacherProcess(key, RunDirectory(Path("none")), record, 0.0, **values)  # type: ignore[arg-type]


def add_job(server: SmallServer, name: str, address: str, waits_for: str = "") -> None:
    config = OnPolicyJob(
        student=StudentConfig(model="tiny"),
        data=DataConfig(path="x"),
        teacher=OnPolicyTeacher(address=address),
        name=name,
    )
    server.store.add_all([NewJob(name, config, config, waits_for=waits_for)])


def test_all_teachers_are_listed(tmp_path: Path) -> None:
    """One that loads, one that failed, one that is away, and the jobs of each."""
    processes = [
        make_process("loading", stage="weights 40%", is_running=True),
        make_process("failed", failure="there is no such model"),
    ]
    with small_server(tmp_path / "runs", Policy(Machine(slots=3))) as server:
        store = server.store
        add_job(server, "waiting", "127.0.0.1:1", waits_for="teacher.address")
        add_job(server, "running", "127.0.0.1:1")
        store.begin_attempt(store.job("running"), Share(1), Change(JobState.PREPARING))
        metrics = {"time/step": 2.0, "time/teacher_wait": 0.5}
        store.change("running", Change(JobState.RUNNING), Change(step=1, metrics=metrics))
        away, loading, failed = asyncio.run(Teachers(store, processes).list_records())
    assert (away["jobs"], away["waiting"]) == ({"running": pytest.approx(0.25)}, ["waiting"])
    assert "cannot reach" in away["fault"]["message"]
    assert [loading["process"][name] for name in ("state", "stage", "gpus", "attempt")] == [
        *("LOADING", "weights 40%", ("0", "1"), 3)
    ]
    assert (failed["process"]["state"], failed["process"]["reason"]) == (
        *("FAILED", "there is no such model"),
    )
    assert not {"info", "load", "fault"} & loading.keys()

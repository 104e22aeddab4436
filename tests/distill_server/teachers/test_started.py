"""Teachers that a real server starts: processes of the fake engine, for scripted trainers."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from clients.cli.app import main
from clients.config.on_policy import OnPolicyJob, OnPolicyTeacher
from clients.jobs.client import DistillClient, JobHandle
from clients.jobs.job import JobState, StartedTeacher
from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery
from distill_server.runners.local.process import identity_of
from distill_server.runners.machine import Machine, Share
from protos.errors import InvalidInput
from tests.distill_server.conftest import Server, eventually, job_config

MakeServer = Callable[..., Server]


def make_taught_job(words: str, model: str = "vocab=50", **changes: Any) -> OnPolicyJob:
    teacher = OnPolicyTeacher(model=model, engine="fake", gpus=changes.pop("teacher_gpus", None))
    change = {"teacher": teacher, "max_steps": changes.pop("max_steps", 5)}
    values = {**job_config(words).model_dump(), **changes}
    return OnPolicyJob.model_validate(values).model_copy(update=change)


def only_teacher(client: DistillClient) -> StartedTeacher:
    (teacher,) = client.teachers()
    return teacher


def wait_until_running(client: DistillClient, job: JobHandle, step: int = 1) -> None:
    eventually(lambda: client.get(job.id).step >= step)


def process_of(server: Server, teacher: StartedTeacher) -> psutil.Process:
    card = server.runs / ".teachers" / teacher.key / "logs" / f"attempt-{teacher.attempt}"
    return psutil.Process(json.loads((card / "shim.json").read_text())["child_pid"])


def test_two_jobs_share_one_and_it_goes_after_the_last(
    make_server: MakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server = make_server(slots=2, linger=0.5)
    with DistillClient(server.address) as client:
        jobs = [client.submit(make_taught_job(f"{n} pause=0.3")) for n in "ab"]
        phases = {event.phase for job in jobs for event in job.watch() if event.phase}
        assert any(
            phase.startswith("WAITING teacher.model: the teacher has been loading since")
            for phase in phases
        )
        addresses = [
            json.loads((server.runs / job.id / "teacher.json").read_text()) for job in jobs
        ]
        assert addresses[0] == addresses[1]
        for job in jobs:
            assert job.refresh().state is JobState.SUCCEEDED
            assert job.refresh().attempt == 1
        eventually(lambda: not client.teachers())
        assert list((server.runs / ".teachers").iterdir()) == []
        assert main(["--server", server.address, "teacher", "ls"]) == 0
        assert "the server runs no teacher" in capsys.readouterr().err
        later_job = client.submit(make_taught_job("c"))
        assert later_job.wait(60).state is JobState.SUCCEEDED, "it is started again"
        assert only_teacher(client).attempt == 1


@pytest.mark.slow
def test_a_teacher_that_is_there_costs_the_server_nothing(make_server: MakeServer) -> None:
    server = make_server()
    with DistillClient(server.address) as client:
        assert client.submit(make_taught_job("x")).wait(60).state is JobState.SUCCEEDED
        assert only_teacher(client).state == "READY"
        assert server.process
        process = psutil.Process(server.process.pid)
        seconds_before = sum(process.cpu_times()[:2])
        time.sleep(4)
        assert only_teacher(client).state == "READY"
        assert sum(process.cpu_times()[:2]) - seconds_before < 0.8, "a fifth of a core, at any load"


@pytest.mark.slow
def test_what_is_listed_answers(
    make_server: MakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server = make_server()
    with DistillClient(server.address) as client:
        job = client.submit(make_taught_job("pause=0.2", max_steps=1000))
        wait_until_running(client, job)
        started_teacher = only_teacher(client)
        assert (started_teacher.state, started_teacher.engine, started_teacher.jobs) == (
            "READY",
            "fake",
            (job.id,),
        )
        with TeacherClient(started_teacher.address) as teacher:
            assert teacher.info().vocab_size == 50
            assert only_teacher(client).active_streams == 0
            list(teacher.score([ScoreQuery(np.array([1, 2, 3], np.int32), start=1, top_k=4)]))
            assert only_teacher(client).active_streams == 1, "it stays open"
        assert main(["--server", server.address, "teacher", "ls"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split()[:5] == ["KEY", "STATE", "MODEL", "ENGINE", "ADDRESS"]
        assert lines[1].split()[:5] == [
            started_teacher.key,
            "READY",
            "vocab=50",
            "fake",
            started_teacher.address,
        ]
        client.cancel(job.id, now=True)


def test_a_model_that_cannot_be_loaded_fails_the_job(server: Server, client: DistillClient) -> None:
    job = client.submit(make_taught_job("x", model="nonsense"))
    failed_job = job.wait(60)
    assert failed_job.state is JobState.FAILED
    assert failed_job.reason.startswith(
        "teacher.model: the teacher cannot be started: --model: 'nonse"
    )
    resumed_job = job.resume().wait(60)
    assert (resumed_job.state, resumed_job.attempt) == (JobState.FAILED, 2), (
        "it was tried once more"
    )
    eventually(lambda: not client.teachers())


@pytest.mark.parametrize("victim", ["teacher", pytest.param("shim", marks=pytest.mark.slow)])
def test_a_killed_teacher_comes_back_where_it_was(make_server: MakeServer, victim: str) -> None:
    server = make_server(slots=2)
    with DistillClient(server.address) as client:
        job = client.submit(make_taught_job("pause=0.2", max_steps=1000))
        wait_until_running(client, job)
        first_teacher = only_teacher(client)
        process = process_of(server, first_teacher)
        os.kill(process.pid if victim == "teacher" else process.ppid(), signal.SIGKILL)
        eventually(
            lambda: only_teacher(client).attempt == 2 and only_teacher(client).state == "READY"
        )
        assert only_teacher(client).address == first_teacher.address
        assert identity_of(process.pid) is None
        assert client.get(job.id).attempt == 1
        other_job = client.submit(make_taught_job("other"))
        assert other_job.wait(60).state is JobState.SUCCEEDED
        client.cancel(job.id, now=True)


@pytest.mark.slow
def test_the_next_server_finds_it(make_server: MakeServer) -> None:
    server = make_server(linger=0.5)
    with DistillClient(server.address) as client:
        job = client.submit(make_taught_job("pause=0.2", max_steps=1000))
        wait_until_running(client, job)
        first_teacher = only_teacher(client)
        pid = process_of(server, first_teacher).pid
        server.kill()
        server.start()
        wait_until_running(client, job, step=client.get(job.id).step + 2)
        eventually(lambda: [teacher.state for teacher in client.teachers()] == ["READY"])
        assert (only_teacher(client).attempt, only_teacher(client).jobs) == (1, (job.id,))
        assert process_of(server, only_teacher(client)).pid == pid
        server.kill()
        os.kill(pid, signal.SIGKILL)
        server.start()
        eventually(lambda: client.teachers() and only_teacher(client).state == "READY")
        assert (only_teacher(client).attempt, only_teacher(client).address) == (
            2,
            first_teacher.address,
        )
        client.cancel(job.id, now=True)
        eventually(lambda: not client.teachers())


@pytest.mark.slow
def test_without_a_server_it_ends_after_the_last_trainer(make_server: MakeServer) -> None:
    """Before, it ran for ever, with its GPU. `runners/test_lease.py` has the trainers."""
    server = make_server(lease=1.0)
    with DistillClient(server.address) as client:
        job = client.submit(make_taught_job("pause=0.2"))
        wait_until_running(client, job)
        teacher = process_of(server, only_teacher(client))
        server.kill()
        eventually(lambda: not teacher.is_running())
        server.start()
        assert job.wait(60).state is JobState.SUCCEEDED


@pytest.mark.slow
def test_a_server_killed_while_it_loads(make_server: MakeServer) -> None:
    server = make_server()
    with DistillClient(server.address) as client:
        job = client.submit(make_taught_job("x"))
        eventually(lambda: client.teachers())
        server.kill()
        server.start()
        assert job.wait(60).state is JobState.SUCCEEDED
        assert len(client.teachers()) == 1


def test_gpus_are_counted_and_none_waits_for_ever(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs: each job needs one, and one for its teacher; the second job waits for the first.

    Teachers do not get the keys of trackers.
    """
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    server = make_server(slots=2, gpus=2)
    with DistillClient(server.address) as client:
        with pytest.raises(InvalidInput, match="its teacher 1 more, but the server has 2"):
            client.submit(make_taught_job("x", teacher_gpus=1, resources={"gpus": 2}))
        first_job = client.submit(
            make_taught_job("1 tells_gpus=1 pause=0.2", "vocab=50", teacher_gpus=1)
        )
        second_job = client.submit(make_taught_job("2 tells_gpus=1", "vocab=60", teacher_gpus=1))
        wait_until_running(client, first_job)
        teacher_environment = process_of(server, only_teacher(client)).environ()
        assert "WANDB_API_KEY" not in teacher_environment
        assert psutil.Process(server.card(first_job.id)["child_pid"]).environ()["WANDB_API_KEY"]
        teacher_gpu = teacher_environment["CUDA_VISIBLE_DEVICES"]
        gpu_line = b"".join(client.logs(first_job.id)).splitlines()[0].decode()
        assert {teacher_gpu, gpu_line.removeprefix("GPUs: ")} == {"0", "1"}
        assert second_job.refresh().state is JobState.QUEUED
        assert second_job.wait(60).state is JobState.SUCCEEDED
        assert first_job.refresh().ended_at <= second_job.refresh().started_at


@pytest.mark.slow
def test_a_job_whose_teacher_loads_keeps_its_turn(make_server: MakeServer) -> None:
    """One slot: a later job does not take it; an idle teacher makes room for the next."""
    server = make_server(slots=1)
    with DistillClient(server.address) as client:
        jobs = [client.submit(make_taught_job("1")), client.submit(job_config("2"))]
        jobs += [client.submit(make_taught_job("3", "vocab=60"))]
        final_jobs = [job.wait(60) for job in jobs]
        assert {job.state for job in final_jobs} == {JobState.SUCCEEDED}
        assert sorted(job.started_at for job in final_jobs) == [
            job.started_at for job in final_jobs
        ]
        assert only_teacher(client).model == "vocab=60"


@pytest.mark.slow
def test_a_teacher_of_the_output_of_a_job(make_server: MakeServer) -> None:
    server = make_server(slots=2)
    with DistillClient(server.address) as client:
        first_job, second_job = client.submit_all(
            [job_config("warm"), make_taught_job("x", "@warm/export")]
        )
        assert first_job.wait(60).state is JobState.SUCCEEDED
        failed_job = second_job.wait(60)
        assert failed_job.state is JobState.FAILED, "the fake engine reads no directory"
        assert f"'{server.runs / first_job.id / 'export'}' is not a setting" in failed_job.reason


def test_machines_without_teachers_or_room() -> None:
    job = make_taught_job("x", teacher_gpus=1)
    with pytest.raises(InvalidInput, match="a server with --ray or --slurm starts no teachers"):
        Machine(has_teachers=False).require_room(job)
    machine = Machine(slots=2, gpus=("0", "1"))
    machine.require_room(job)
    assert machine.gpus_for(job.teacher, [Share(0, ("0",))]) == ("1",)
    with pytest.raises(LookupError, match="the teacher needs 1 GPU; 0 are free"):
        machine.gpus_for(job.teacher, [Share(0, ("0", "1"))])
    assert Machine().gpus_for(job.teacher, []) is None


def test_a_token_of_the_server_is_the_teachers(
    make_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "t" * 43
    monkeypatch.setenv("DISTILL_TEACHER_TOKEN", token)
    server = make_server()
    monkeypatch.delenv("DISTILL_TEACHER_TOKEN")
    with DistillClient(server.address) as client:
        job = client.submit(make_taught_job("pause=0.2", max_steps=1000))
        wait_until_running(client, job)
        started_teacher = only_teacher(client)
        tokens = server.runs / ".teachers" / started_teacher.key / "tokens"
        assert tokens.stat().st_mode & 0o777 == 0o600
        from protos.errors import Unauthenticated

        with TeacherClient(started_teacher.address) as teacher, pytest.raises(Unauthenticated):
            teacher.info()
        monkeypatch.setenv("DISTILL_TEACHER_TOKEN", token)
        with TeacherClient(started_teacher.address) as teacher:
            assert teacher.info().vocab_size == 50
        assert token not in " ".join(process_of(server, started_teacher).cmdline())
        client.cancel(job.id, now=True)

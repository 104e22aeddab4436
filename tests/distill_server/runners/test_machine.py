"""Slots, GPUs, CPU threads, priorities, the bound of the queue, and the pauses before retries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clients.jobs.client import DistillClient
from clients.jobs.job import Job, JobState
from distill_server import scheduler
from distill_server.runners.interface import Exited
from distill_server.runners.machine import Machine, Share, visible_gpus
from distill_server.runners.trainer_environment import trainer_environment
from distill_server.scheduler import Policy
from protos.errors import InvalidInput, Overloaded
from tests.distill_server.conftest import Server, job_config
from tests.distill_server.scripted_runner import SmallServer, small_server

EIGHT_GPUS = Machine(slots=8, cpus_per_job=2, cpus=16, gpus=tuple("01234567"))


def submit(server: SmallServer, key: str = "", **changes: Any) -> Job:
    config = job_config().model_dump() | changes
    return server.control.submit(json.dumps(config), "", key)


def list_running(server: SmallServer) -> dict[str, Share]:
    server.look()
    shares = {job_id: share for (job_id, _), share in server.runner.alive.items()}
    # In the order of submission: threads start the jobs at the same time.
    return {j.id: shares[j.id] for j in reversed(server.store.page(limit=99)) if j.id in shares}


def test_gpus_are_divided_and_given_back(tmp_path: Path) -> None:
    with small_server(tmp_path, Policy(EIGHT_GPUS)) as server:
        one_gpu_id = submit(server).id
        four_gpu_id = submit(server, resources={"gpus": 4, "cpus": 8}).id
        no_gpu_id = submit(server, resources={"gpus": 0}).id
        two_ranks_id = submit(server, train={"processes": 2}).id
        assert list_running(server) == {
            one_gpu_id: Share(2, ("0",)),
            four_gpu_id: Share(8, ("1", "2", "3", "4")),
            no_gpu_id: Share(2, ()),
            two_ranks_id: Share(2, ("5", "6")),
        }
        server.close()
        server.start()  # the shares are stored
        waiting_id = submit(server, resources={"gpus": 2}).id
        assert waiting_id not in list_running(server)
        server.runner.end(four_gpu_id, Exited(1))
        server.runner.say(tmp_path, one_gpu_id, "succeeded")
        server.runner.end(one_gpu_id, Exited(0))
        assert list_running(server)[waiting_id] == Share(2, ("0", "1"))


def test_threads_bound_what_runs(tmp_path: Path) -> None:
    with small_server(tmp_path, Policy(Machine(slots=9, cpus=8))) as server:
        jobs = [submit(server, resources={"cpus": n}).id for n in (3, 4, 2, 1)]
        # The third job does not fit, and no job passes it.
        assert list(list_running(server)) == jobs[:2]
        server.runner.end(jobs[0], Exited(1))
        assert list(list_running(server)) == [jobs[1], jobs[2], jobs[3]]


def test_each_process_has_a_thread(tmp_path: Path) -> None:
    with small_server(tmp_path, Policy(Machine(slots=9, cpus=8))) as server:
        jobs = [submit(server, train={"processes": n}).id for n in (6, 2, 1)]
        assert [share.cpus for share in list_running(server).values()] == [6, 2]
        server.runner.end(jobs[0], Exited(1))
        assert jobs[2] in list_running(server)


def test_what_is_never_there_is_refused(tmp_path: Path) -> None:
    with small_server(tmp_path, Policy(EIGHT_GPUS)) as server:
        with pytest.raises(InvalidInput, match="requests 9 GPUs, but the server has 8") as exc_info:
            submit(server, resources={"gpus": 9})
        assert exc_info.value.field == "resources.gpus"
        with pytest.raises(InvalidInput, match="requests 17 CPU threads, but the server has 16"):
            submit(server, resources={"cpus": 17})
        with pytest.raises(InvalidInput, match="17 processes need 17 CPU threads") as exc_info:
            submit(server, train={"processes": 17}, resources={"gpus": 0})
        assert exc_info.value.field == "train.processes"
        assert list(tmp_path.glob("on-policy*")) == []


def test_a_job_too_large_for_a_smaller_server_holds_nobody_up(tmp_path: Path) -> None:
    with small_server(tmp_path, Policy(EIGHT_GPUS)) as server:
        large_job = submit(server, resources={"gpus": 4})
        server.close()
        server.policy = Policy(Machine(gpus=("0", "1")))
        server.start()
        small_job = submit(server)
        server.look()  # the scheduler notices that it is too large
        assert list(list_running(server)) == [small_job.id]
        server.look()
        stored_job = server.store.job(large_job.id)
        assert stored_job.state is JobState.QUEUED
        assert "requests 4 GPUs, but the server has 2" in stored_job.phase
        assert stored_job.last_seq == 2


def test_a_job_that_an_upgrade_refuses_ends_and_holds_nobody_up(tmp_path: Path) -> None:
    """An old server accepted a configuration that the new version refuses."""
    with small_server(tmp_path, Policy(retries=1, backoff=0)) as server:
        old_job, new_job = submit(server), submit(server)
        server.store._db.execute(
            "UPDATE jobs SET config_json = json_set(config_json, '$.train.gone', 1) WHERE id = ?",
            (old_job.id,),
        )
        for _ in range(2):  # the start and the retry
            server.look()
        assert list(list_running(server)) == [new_job.id]
        stored_job = server.store.job(old_job.id)
        assert stored_job.state is JobState.FAILED
        assert stored_job.reason.startswith("the trainer could not be started: train.gone: ")
        assert server.runner.started == [(new_job.id, 1)]


def test_a_job_that_an_upgrade_refuses_uses_no_retry(tmp_path: Path) -> None:
    with small_server(tmp_path, Policy(retries=5, backoff=60)) as server:
        job = submit(server)
        server.store._db.execute(
            "UPDATE jobs SET config_json = json_set(config_json, '$.train.gone', 1) WHERE id = ?",
            (job.id,),
        )
        server.look()
        stored_job = server.store.job(job.id)
        assert (stored_job.state, stored_job.attempt) == (JobState.FAILED, 1)


def test_priorities_first_then_first_come(tmp_path: Path) -> None:
    with small_server(tmp_path, Policy()) as server:
        jobs = [submit(server, priority=p).id for p in (0, -5, 7, 0, 7)]
        order = []
        for _ in jobs:
            (job_id,) = list_running(server)
            order.append(job_id)
            server.runner.say(tmp_path, job_id, "succeeded")
            server.runner.end(job_id, Exited(0))
        assert order == [jobs[2], jobs[4], jobs[0], jobs[3], jobs[1]]


def test_a_full_queue_says_how_many_and_what_to_do(tmp_path: Path) -> None:
    with small_server(tmp_path, Policy(max_queued=3)) as server:
        jobs = [submit(server, key=f"k{n}") for n in range(3)]
        with pytest.raises(Overloaded, match="3 jobs are queued") as exc_info:
            submit(server, key="k3")
        assert "--most-queued" in exc_info.value.hint
        assert submit(server, key="k1").id == jobs[1].id  # already queued
        assert len(list(tmp_path.glob("on-policy*"))) == 3
        server.cancel(jobs[0].id, now=False)
        submit(server, key="k3")
        with pytest.raises(Overloaded):
            server.control.resume(jobs[0].id, max_steps=0, from_step=0)


def test_pauses_double_to_six_minutes_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash loop on a scripted clock; other jobs run meanwhile, and a resume needs no pause."""
    clock = [0.0]
    monkeypatch.setattr(scheduler.time, "monotonic", lambda: clock[0])
    with small_server(tmp_path, Policy(retries=8)) as server:
        job = submit(server)
        pauses = []
        while server.store.job(job.id).state is not JobState.FAILED:
            assert list(list_running(server)) == [job.id]
            server.runner.end(job.id, Exited(1))
            server.look()
            time_before = clock[0]
            while not list_running(server) and server.store.job(job.id).state is JobState.QUEUED:
                clock[0] += 1
            pauses.append(clock[0] - time_before)
        assert pauses[:-1] == [10, 20, 40, 80, 160, 320, 360, 360]
        assert server.store.job(job.id).attempt == 9
        assert "exited with code 1" in server.store.job(job.id).reason
        server.control.resume(job.id, max_steps=0, from_step=0)
        assert list(list_running(server)) == [job.id]
        server.runner.end(job.id, Exited(1))
        server.look()
        other_job = submit(server)
        assert list(list_running(server)) == [other_job.id]


def test_the_environment_names_the_share() -> None:
    server_variables = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    visible_devices = [
        trainer_environment(server_variables, Share(8, gpus), processes=2)["CUDA_VISIBLE_DEVICES"]
        for gpus in (None, (), ("2", "3"))
    ]
    assert visible_devices == ["0,1,2,3", "", "2,3"]
    assert trainer_environment(server_variables, Share(8), processes=2)["OMP_NUM_THREADS"] == "4"


def test_gpus_of_a_server_that_has_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-1f,5")
    assert visible_gpus(2) == ("3", "GPU-1f")
    with pytest.raises(InvalidInput, match="names 3 GPUs, not 4"):
        visible_gpus(4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus(2) == ("0", "1")


def test_a_trainer_is_given_its_gpus(make_server: Callable[..., Server]) -> None:
    server = make_server(slots=2, gpus=2)
    with DistillClient(server.address) as client:
        jobs = [client.submit(job_config(f"pause=0.1 tells_gpus=1 n={n}", 5)) for n in range(2)]
        for job in jobs:
            assert client.wait(job.id, timeout=60).state is JobState.SUCCEEDED
        logs = [(server.runs / j.id / "logs/attempt-1/rank-0.log").read_text() for j in jobs]
    assert sorted(log.split("GPUs: ")[1].split()[0] for log in logs) == ["0", "1"]


def test_engines_need_gpus_of_their_own(tmp_path: Path) -> None:
    """What cannot fit is refused before it is queued, in one sentence."""
    rollouts, train = {"gpus": 4, "lag": 1}, {"processes": 4}
    with small_server(tmp_path, Policy(EIGHT_GPUS)) as server:
        job = submit(server, rollouts=rollouts, train=train)
        assert list_running(server)[job.id] == Share(4, tuple("01234567"))
        with pytest.raises(
            InvalidInput, match="requests 10 GPUs, but the server has 8"
        ) as exc_info:
            submit(server, rollouts=rollouts, train={"processes": 6})
        assert exc_info.value.field == "resources.gpus"
        too_few = "requests 4 GPUs, but its 4 processes and its rollout engines need 8"
        with pytest.raises(InvalidInput, match=too_few) as exc_info:
            submit(server, rollouts=rollouts, train=train, resources={"gpus": 4})
        assert (exc_info.value.field, bool(exc_info.value.hint)) == ("resources.gpus", True)


def test_certificates_of_a_relative_path_are_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server_variables = {
        "DISTILL_TLS_CA": "ca.pem",
        "DISTILL_TLS_KEY": "",
        "DISTILL_TLS_CERT": "/etc/c.pem",
    }
    trainer_variables = trainer_environment(server_variables, Share(1), processes=1)
    assert {name: trainer_variables[name] for name in server_variables} == server_variables | {
        "DISTILL_TLS_CA": str(tmp_path / "ca.pem")
    }

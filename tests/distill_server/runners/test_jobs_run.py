"""Jobs through the real server and client, with scripted trainers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from clients.config.file import JobFile
from clients.jobs.client import DistillClient
from clients.jobs.job import JobState
from clients.runs.directory import RunDirectory
from distill_server.runners.local.process import family
from protos import distill_pb2 as pb
from protos.distill_pb2_grpc import DistillStub
from protos.errors import InvalidInput, NotFound, TimedOut, WrongState
from protos.rpc.statuses import fault_of
from tests.distill_server.conftest import Server, eventually, job_config


def wait_for(client: DistillClient, job_id: str, state: JobState) -> None:
    eventually(lambda: client.get(job_id).state is state)


def steps_of(client: DistillClient, job_id: str) -> list[tuple[int, int]]:
    return [(event.attempt, event.step) for event in client.watch(job_id) if event.metrics]


def test_submit_watch_succeeded(server: Server, client: DistillClient) -> None:
    config = job_config("My First job!", max_steps=7)
    job = client.submit(JobFile(Path("job.toml"), "max_steps = 7\n", config, {}))
    assert job.state is JobState.QUEUED
    assert job.id.startswith("on-policy-my-first-job-")
    events = list(client.watch(job.id))
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert [event.step for event in events if event.metrics] == [1, 2, 3, 4, 5, 6, 7]
    states = [event.state for event in events]
    order = [JobState.QUEUED, JobState.PREPARING, JobState.RUNNING, JobState.SUCCEEDED]
    assert list(dict.fromkeys(states)) == order
    final_job = client.get(job.id)
    assert (final_job.state, final_job.step, final_job.metrics) == (
        JobState.SUCCEEDED,
        7,
        {"loss": 1 / 7},
    )
    assert 0 < final_job.created_at <= final_job.started_at <= final_job.ended_at
    assert final_job.config_json == config.model_dump_json()
    assert (server.runs / job.id / "job.toml").read_text() == "max_steps = 7\n"
    assert RunDirectory(server.runs / job.id).config() == config


@pytest.mark.parametrize("key", ["a-key", None])
def test_same_key_from_many_threads_is_one_job(client: DistillClient, key: str | None) -> None:
    config = job_config()
    with ThreadPoolExecutor(8) as pool:
        jobs = pool.map(lambda _: client.submit(config, idempotency_key=key), range(8))
        ids = {job.id for job in jobs}
    assert len(ids) == (1 if key else 8)
    assert {job.id for job in client.list()} == ids


def test_key_of_another_job_is_refused(client: DistillClient) -> None:
    client.submit(job_config("one"), idempotency_key="key")
    with pytest.raises(InvalidInput, match="another job"):
        client.submit(job_config("two"), idempotency_key="key")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_steps": 0}, "max_steps"),
        ({"student": {}}, "student.model"),
        ({"train": {"learning_rate": -1}}, "train.learning_rate"),
        ({"surprise": 1}, "surprise"),
        ({"name": None}, "name"),
    ],
)
def test_bad_config_names_its_field(
    server: Server, client: DistillClient, change: dict[str, object], field: str
) -> None:
    """The server validates what a client without validation sends."""
    config_json = json.dumps(job_config().model_dump() | change)
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
        DistillStub(channel).SubmitJob(pb.SubmitJobRequest(config_json=config_json))
    assert fault_of(caught.value, "").field == field
    assert client.list() == []


def test_slots_and_first_come_first_served(make_server: Callable[..., Server]) -> None:
    server = make_server(slots=2)
    with DistillClient(server.address) as client:
        ids = [client.submit(job_config(f"n{n}", max_steps=4 + n % 3)).id for n in range(6)]
        changes = []
        for job_id in ids:
            for event in client.watch(job_id):
                changes.append((event.time, event.state, job_id))
        running_ids: set[str] = set()
        start_order: list[str] = []
        for _, state, job_id in sorted(changes, key=lambda change: change[0]):
            if state is JobState.SUCCEEDED:
                running_ids.remove(job_id)
            elif state is not JobState.QUEUED and job_id not in running_ids:
                running_ids.add(job_id)
                start_order.append(job_id)
            assert len(running_ids) <= 2
        assert start_order == ids


def test_cancel_queued(client: DistillClient) -> None:
    first_job = client.submit(job_config("pause=1", max_steps=1000))
    second_job = client.submit(job_config())
    why = "WAITING place 1: the only slot is in use"
    eventually(lambda: client.get(second_job.id).phase == why)
    assert {job.id: job.phase for job in client.list()}[second_job.id] == why
    cancelled_job = client.cancel(second_job.id)
    assert cancelled_job.state is JobState.CANCELLED
    assert cancelled_job.reason == "cancelled while queued"
    assert client.cancel(second_job.id) == cancelled_job
    assert client.get(first_job.id).state is not JobState.CANCELLED


def test_cancel_running_writes_a_checkpoint(server: Server, client: DistillClient) -> None:
    job = client.submit(job_config(max_steps=100_000))
    eventually(lambda: client.get(job.id).step >= 3)
    assert client.cancel(job.id).state is JobState.CANCELLING
    client.cancel(job.id)
    final_job = client.wait(job.id, timeout=20)
    assert (final_job.state, final_job.reason) == (JobState.CANCELLED, "cancelled on request")
    assert (server.runs / job.id / "checkpoints" / f"step-{final_job.step:06d}").is_dir()
    assert client.cancel(job.id).state is JobState.CANCELLED


@pytest.mark.slow
def test_cancel_waits_for_a_long_step(server: Server, client: DistillClient) -> None:
    """A step takes longer than the grace periods of the server's policy and of its shim."""
    job = client.submit(job_config("pause=9 timed=1 every=1000000", max_steps=100_000))
    eventually(lambda: client.get(job.id).step >= 1)
    client.cancel(job.id)
    final_job = client.wait(job.id, timeout=60)
    assert (final_job.state, final_job.reason) == (JobState.CANCELLED, "cancelled on request")
    assert (server.runs / job.id / "checkpoints" / f"step-{final_job.step:06d}").is_dir()


def test_cancel_now_takes_no_checkpoint(server: Server, client: DistillClient) -> None:
    job = client.submit(job_config("every=1000000", max_steps=100_000))
    eventually(lambda: client.get(job.id).step >= 1)
    client.cancel(job.id, now=True)
    # This request for a checkpoint comes too late.
    client.cancel(job.id)
    assert RunDirectory(server.runs / job.id).read_control().stop == "now"
    final_job = client.wait(job.id, timeout=20)
    assert final_job.state is JobState.CANCELLED
    assert not (server.runs / job.id / "checkpoints" / f"step-{final_job.step:06d}").exists()


@pytest.mark.parametrize("now", [True, False])
def test_cancel_of_a_trainer_that_ignores_everything(
    server: Server, client: DistillClient, now: bool
) -> None:
    job = client.submit(job_config("hang_at=2 deaf=1 orphan=1", max_steps=10))
    eventually(lambda: client.get(job.id).step == 1)
    mark = str(server.card(job.id)["mark"])
    assert len(family(mark)) == 2
    client.cancel(job.id)
    if now:
        client.cancel(job.id, now=True)
    final_job = client.wait(job.id, timeout=30)
    assert final_job.state is JobState.CANCELLED
    assert final_job.reason == "cancelled; the trainer was killed by signal 9 at step 1"
    assert family(mark) == []


def test_cancel_of_what_is_over_or_unknown(client: DistillClient) -> None:
    job = client.submit(job_config())
    client.wait(job.id, timeout=20)
    with pytest.raises(WrongState, match="has already succeeded"):
        client.cancel(job.id)
    with pytest.raises(NotFound):
        client.cancel("nothing")


def test_cancel_and_resume_from_many_threads(client: DistillClient) -> None:
    """In any order there are only legal states and one job, which can still be cancelled."""
    job = client.submit(job_config(max_steps=100_000))

    def press(number: int) -> None:
        try:
            if number % 2:
                client.cancel(job.id, now=True)
            else:
                client.resume(job.id)
        except WrongState:
            pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(press, range(60)))
    client.cancel(job.id, now=True)
    assert client.wait(job.id, timeout=30).state is JobState.CANCELLED
    events = list(client.watch(job.id))
    assert [event.seq for event in events] == list(range(1, len(events) + 1))


def test_resume_after_cancel_continues(client: DistillClient) -> None:
    job = client.submit(job_config(max_steps=100_000))
    eventually(lambda: client.get(job.id).step >= 3)
    client.cancel(job.id)
    cancelled_job = client.wait(job.id, timeout=20)
    last_step = cancelled_job.step + 5
    resumed_job = client.resume(job.id, max_steps=last_step)
    assert (resumed_job.state, resumed_job.attempt, resumed_job.ended_at) == (
        JobState.QUEUED,
        2,
        0.0,
    )
    final_job = client.wait(job.id, timeout=30)
    assert (final_job.state, final_job.step, final_job.attempt) == (
        JobState.SUCCEEDED,
        last_step,
        2,
    )
    steps = steps_of(client, job.id)
    assert steps == [(1 if n <= cancelled_job.step else 2, n) for n in range(1, last_step + 1)]


def test_resume_after_failure_redoes_from_the_checkpoint(client: DistillClient) -> None:
    job = client.submit(job_config("fail_at=8", max_steps=10))
    failed_job = client.wait(job.id, timeout=20)
    assert (failed_job.state, failed_job.reason) == (JobState.FAILED, "the loss is not finite")
    client.resume(job.id, from_step=5)
    client.wait(job.id, timeout=20)
    first_steps = [(1, n) for n in range(1, 8)]
    assert steps_of(client, job.id) == [*first_steps, (2, 6), (2, 7)]
    with pytest.raises(NotFound, match="no checkpoint of step 6"):
        client.resume(job.id, from_step=6)


def test_resume_of_a_success_needs_more_steps(server: Server, client: DistillClient) -> None:
    job = client.submit(job_config(max_steps=5))
    client.wait(job.id, timeout=20)
    for steps in (None, 5, 3):
        with pytest.raises(WrongState, match="succeeded with all of its 5 steps"):
            client.resume(job.id, max_steps=steps)
    assert client.resume(job.id, max_steps=8).max_steps == 8
    final_job = client.wait(job.id, timeout=20)
    assert (final_job.state, final_job.step) == (JobState.SUCCEEDED, 8)
    assert RunDirectory(server.runs / job.id).config().max_steps == 8
    assert steps_of(client, job.id)[-3:] == [(2, 6), (2, 7), (2, 8)]


def test_resume_of_a_running_job(client: DistillClient) -> None:
    job = client.submit(job_config(max_steps=100_000))
    with pytest.raises(WrongState, match="only a job that ended"):
        client.resume(job.id)


def test_killed_trainer_is_retried_once(client: DistillClient) -> None:
    job = client.submit(job_config("crash_at=7 crashes=1", max_steps=9))
    final_job = client.wait(job.id, timeout=20)
    assert (final_job.state, final_job.attempt, final_job.reason) == (JobState.SUCCEEDED, 2, "")
    events = list(client.watch(job.id))
    requeue_event = [event for event in events if event.state is JobState.QUEUED][1]
    assert requeue_event.reason == "the trainer was killed by signal 9 at step 6"
    assert requeue_event.phase == "retrying in 0.1 s"
    steps = [(event.attempt, event.step) for event in events if event.metrics]
    assert steps == [(1, n) for n in range(1, 7)] + [(2, n) for n in range(6, 10)]


def test_trainer_that_dies_every_time_fails_with_its_last_words(client: DistillClient) -> None:
    job = client.submit(job_config("crash_at=3 crash_code=5", max_steps=9))
    final_job = client.wait(job.id, timeout=20)
    assert (final_job.state, final_job.attempt) == (JobState.FAILED, 2)
    first_line, *log = final_job.reason.splitlines()
    assert first_line == (
        "the trainer exited with code 5 without a final status at step 2; its log ends with:"
    )
    assert log[-1] == "about to crash"
    # A resumed job has its retry again.
    client.resume(job.id)
    assert client.wait(job.id, timeout=20).attempt == 4


def test_trainer_killed_from_outside(server: Server, client: DistillClient) -> None:
    job = client.submit(job_config("hang_at=5 hangs=1", max_steps=10))
    eventually(lambda: client.get(job.id).step == 4)
    os.kill(int(server.card(job.id)["child_pid"]), signal.SIGKILL)
    final_job = client.wait(job.id, timeout=30)
    assert (final_job.state, final_job.attempt, final_job.step) == (JobState.SUCCEEDED, 2, 10)


def test_trainer_told_to_stop_from_outside_is_queued_again(
    server: Server, client: DistillClient
) -> None:
    """A preemption or a drained machine: no cancel was requested."""
    job = client.submit(job_config("pause=0.05", max_steps=60))
    eventually(lambda: client.get(job.id).step >= 1)
    os.kill(int(server.card(job.id)["child_pid"]), signal.SIGTERM)
    final_job = client.wait(job.id, timeout=60)
    assert (final_job.state, final_job.attempt, final_job.step) == (JobState.SUCCEEDED, 2, 60)
    requeue_events = [
        e for e in client.watch(job.id) if e.state is JobState.QUEUED and e.attempt == 2
    ]
    assert requeue_events[0].reason == "the trainer was stopped by SIGTERM"


def test_names_of_jobs(client: DistillClient) -> None:
    first_job = client.submit(job_config("same"))
    second_job = client.submit(job_config("same"))
    client.submit(job_config("../../etc/passwd \u00e9"))
    with pytest.raises(InvalidInput, match="is ambiguous: it matches") as exc_info:
        client.get("on-policy-same-")
    assert first_job.id in str(exc_info.value)
    assert second_job.id in str(exc_info.value)
    # The ids may differ only in the last digit.
    prefix = first_job.id[:-1] if first_job.id[:-1] != second_job.id[:-1] else first_job.id
    assert client.get(prefix).id == first_job.id
    assert client.get("@last").id.startswith("on-policy-etc-passwd-")
    with pytest.raises(NotFound, match="no job 'nope'"):
        client.get("nope")


def test_list(client: DistillClient, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [client.submit(job_config(f"n{n}")).id for n in range(5)]
    client.wait(ids[-1], timeout=30)
    newest_jobs = client.list(limit=2)
    assert [job.id for job in newest_jobs] == [ids[4], ids[3]]
    assert [job.id for job in client.list(before_id=ids[3])] == ids[2::-1]
    assert len(client.list(state=JobState.SUCCEEDED)) == 5
    monkeypatch.setattr("clients.jobs.client.MAX_PAGE_JOBS", 2)
    assert [job.id for job in client.list(limit=3)] == ids[:1:-1]
    assert [job.id for job in client.list()] == ids[::-1]
    assert client.list(state=JobState.RUNNING) == []
    assert newest_jobs[0].config_json == ""


def test_wait_times_out(client: DistillClient) -> None:
    job = client.submit(job_config(max_steps=100_000))
    with pytest.raises(TimedOut, match=f"{job.id} did not end within 0.3 s"):
        client.wait(job.id, timeout=0.3)

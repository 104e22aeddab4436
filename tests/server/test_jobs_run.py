from __future__ import annotations

from clients.distill_client import DistillClient
from clients.jobs import JobState

from .conftest import job_config


def test_submit_watch_succeeded(client: DistillClient) -> None:
    job = client.submit(job_config("My First job!", max_steps=7))
    assert job.state is JobState.QUEUED
    assert job.id.startswith("on-policy-my-first-job-")
    events = list(client.watch(job.id))
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    steps = [event.step for event in events if event.metrics]
    assert steps == [1, 2, 3, 4, 5, 6, 7]
    assert events[-1].state is JobState.SUCCEEDED
    done = client.get(job.id)
    assert (done.state, done.step, done.metrics) == (JobState.SUCCEEDED, 7, {"loss": 1 / 7})
    assert done.created_at <= done.started_at <= done.ended_at

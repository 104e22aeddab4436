"""The calls of plots and reports: the events up to now, and the notes of a job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clients.jobs.client import DistillClient
from clients.jobs.job import JobState
from clients.jobs.record import notes_in, points_of
from protos.errors import NotFound, WrongState
from tests.distill_server.conftest import Server, eventually, job_config


def test_the_history_of_a_job_that_runs_ends_now(client: DistillClient) -> None:
    job = client.submit(job_config("pause=0.02 every=1000", max_steps=5000))
    eventually(lambda: client.get(job.id).step > 3)
    events = client.history(job.id[:-1])
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert len(events) >= 4
    assert len(client.history("@last")) >= len(events)
    client.cancel(job.id, now=True)
    assert client.wait(job.id, timeout=20).state is JobState.CANCELLED


def test_the_curve_of_a_resumed_job_has_each_step_once(client: DistillClient) -> None:
    job = client.submit(job_config("hang_at=8 hangs=1 every=5", max_steps=12))
    eventually(lambda: client.get(job.id).step == 7)
    client.cancel(job.id, now=True)
    assert client.wait(job.id, timeout=20).state is JobState.CANCELLED
    client.resume(job.id)
    assert client.wait(job.id, timeout=20).state is JobState.SUCCEEDED
    events = client.history(job.id)
    assert [event.step for event in events if event.metrics].count(7) == 2
    points = points_of(events)
    assert [point.step for point in points] == list(range(1, 13))
    assert points[-1].metrics == {"loss": 1 / 12}


def test_notes(server: Server, client: DistillClient, tmp_path: Path) -> None:
    job = client.submit(job_config("fail_at=2"))
    assert client.wait(job.id, timeout=20).state is JobState.FAILED
    with pytest.raises(NotFound, match="has no notes yet"):
        client.pull_notes(job.id, tmp_path / "none")
    run = server.runs / job.id
    (run / "samples").mkdir()
    (run / "samples" / "step-000001.jsonl").write_text(json.dumps({"prompt": "1+1="}) + "\n")
    (run / "environment.json").write_text('{"torch": "2"}')
    fetched = client.pull_notes(job.id, tmp_path / "notes")
    assert sorted(path.name for path in fetched.rglob("*") if path.is_file()) == [
        *("environment.json", "step-000001.jsonl")
    ]
    notes = notes_in(fetched)
    assert (notes.environment, notes.samples_step) == ({"torch": "2"}, 1)
    assert notes.samples == [{"prompt": "1+1="}]
    (run / "environment.json").unlink()
    (run / "environment.json").symlink_to("/etc/hostname")
    with pytest.raises(WrongState, match="link"):
        client.pull_notes(job.id, tmp_path / "linked")

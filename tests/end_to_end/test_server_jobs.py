"""Jobs of a real server: cancelled, resumed, pulled, and adopted by its successor."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clients.jobs.client import DistillClient
from clients.jobs.job import JobEvent, JobState
from clients.runs.directory import RunDirectory
from tests.distill_server.conftest import eventually
from tests.distill_server.test_restart import Watcher
from tests.end_to_end.processes import MakeServer, metrics_of, weights

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material


def state_changes(events: Sequence[JobEvent]) -> list[tuple[JobState, int]]:
    """Return (state, attempt) at each change."""
    event_states = [(event.state, event.attempt) for event in events]
    return [
        state
        for previous, state in zip([None, *event_states], event_states, strict=False)
        if state != previous
    ]


def assert_each_once(events: Sequence[JobEvent], max_steps: int) -> None:
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    steps = [event.step for event in events if event.metrics]
    assert steps == list(range(max_steps + 1))


@pytest.fixture
def watchers() -> Iterator[list[Watcher]]:
    """Watcher threads, which must end before the test does."""
    started_watchers: list[Watcher] = []
    yield started_watchers
    for watcher in started_watchers:
        watcher.result()


def test_cancelled_resumed_pulled(
    material: Material,
    teacher: str,
    make_server: MakeServer,
    undisturbed: RunDirectory,
    tmp_path: Path,
) -> None:
    """The same bits as a run without interruption; every step is reported exactly once."""
    from tests.student_trainer.tiny import curve, job

    server = make_server()
    with DistillClient(server.address) as client:
        submitted_job = client.submit(job(material, teacher))
        for event in client.watch(submitted_job.id):
            if event.step >= 6:
                break
        client.cancel(submitted_job.id)
        cancelled_job = client.wait(submitted_job.id, timeout=200)
        assert cancelled_job.state is JobState.CANCELLED, cancelled_job.reason
        run = RunDirectory(server.runs / cancelled_job.id)
        assert metrics_of(run)[-1]["step"] == cancelled_job.step
        assert (run.checkpoints / f"step-{cancelled_job.step:06d}").is_dir()

        client.resume(cancelled_job.id)
        ended_job = client.wait(cancelled_job.id, timeout=200)
        assert (ended_job.state, ended_job.attempt, ended_job.step) == (JobState.SUCCEEDED, 2, 60)
        events = list(client.watch(cancelled_job.id))
        assert_each_once(events, 60)
        assert state_changes(events) == [
            (JobState.QUEUED, 1),
            (JobState.PREPARING, 1),
            (JobState.RUNNING, 1),
            (JobState.CANCELLING, 1),
            (JobState.CANCELLED, 1),
            (JobState.QUEUED, 2),
            (JobState.PREPARING, 2),
            (JobState.RUNNING, 2),
            (JobState.SUCCEEDED, 2),
        ]
        assert curve(metrics_of(run)) == curve(metrics_of(undisturbed))
        lines = [{"step": event.step, **event.metrics} for event in events if event.metrics]
        assert curve(lines) == curve(metrics_of(undisturbed))
        pulled_path = client.pull(cancelled_job.id, tmp_path / "pulled")
    pulled_digest = hashlib.sha256((pulled_path / "model.safetensors").read_bytes()).hexdigest()
    assert pulled_digest == weights(run) == weights(undisturbed)
    assert_usable(pulled_path)


def assert_usable(directory: Path) -> None:
    """Load the model and run it with transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    logits = model(**tokenizer("12+34=", return_tensors="pt", return_token_type_ids=False)).logits
    assert logits.shape == (1, 6, len(tokenizer))
    assert bool(torch.isfinite(logits).all())


@pytest.mark.slow
def test_the_server_stops_with_checkpoints(
    material: Material, teacher: str, make_server: MakeServer, undisturbed: RunDirectory
) -> None:
    """The trainer ends with the server; the next server comes to the same bits."""
    from tests.student_trainer.tiny import curve, job

    server = make_server(arguments=["--on-stop=checkpoint", "--stop-grace=200"])
    with DistillClient(server.address) as client:
        submitted_job = client.submit(job(material, teacher))
        eventually(lambda: client.get(submitted_job.id).step >= 6, 200)
        assert server.kill(signal.SIGTERM) == 0
        run = RunDirectory(server.runs / submitted_job.id)
        last_step = metrics_of(run)[-1]["step"]
        assert (run.checkpoints / f"step-{last_step:06d}").is_dir()
        server.start()
        ended_job = client.wait(submitted_job.id, timeout=200)
        assert (ended_job.state, ended_job.attempt) == (JobState.SUCCEEDED, 2), ended_job.reason
        events = list(client.watch(submitted_job.id))
    assert_each_once(events, 60)
    reasons = {event.reason for event in events}
    assert "stopped for a restart of the server" in reasons
    assert curve(metrics_of(run)) == curve(metrics_of(undisturbed))
    assert weights(run) == weights(undisturbed)


@pytest.mark.slow
def test_the_server_is_killed_under_a_job(
    material: Material, teacher: str, make_server: MakeServer, watchers: list[Watcher]
) -> None:
    """The same trainer continues; a watcher sees every event once."""
    from tests.student_trainer.tiny import job

    steps = 120
    server = make_server()
    with DistillClient(server.address) as client:
        config = job(material, teacher, max_steps=steps, checkpoint__every=50, eval__every=steps)
        submitted_job = client.submit(config)
        watchers.append(Watcher(server.address, submitted_job.id))
        eventually(lambda: client.get(submitted_job.id).step >= 5, 60)
        card = server.card(submitted_job.id)
        server.kill()
        server.start()
        assert client.get(submitted_job.id).state is JobState.RUNNING
        eventually(lambda: client.get(submitted_job.id).step > 20, 60)
        assert server.card(submitted_job.id) == card
        ended_job = client.wait(submitted_job.id, timeout=200)
    assert (ended_job.state, ended_job.attempt, ended_job.step) == (JobState.SUCCEEDED, 1, steps)
    assert not (server.runs / submitted_job.id / "logs" / "attempt-2").exists()
    events = watchers[0].result()
    assert_each_once(events, steps)
    assert events[-1].state is JobState.SUCCEEDED


@pytest.mark.slow
def test_the_trainer_is_killed_under_the_server(
    material: Material, teacher: str, make_server: MakeServer, undisturbed: RunDirectory
) -> None:
    """The server restarts the trainer, which comes to the same bits."""
    from tests.student_trainer.tiny import curve, job

    server = make_server()
    with DistillClient(server.address) as client:
        submitted_job = client.submit(job(material, teacher))
        for event in client.watch(submitted_job.id):
            if event.step >= 6:
                os.kill(server.card(submitted_job.id)["child_pid"], signal.SIGKILL)
                break
        ended_job = client.wait(submitted_job.id, timeout=200)
        assert (ended_job.state, ended_job.attempt) == (JobState.SUCCEEDED, 2), ended_job.reason
    run = RunDirectory(server.runs / submitted_job.id)
    assert curve(metrics_of(run)) == curve(metrics_of(undisturbed))
    assert weights(run) == weights(undisturbed)

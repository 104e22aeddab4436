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


def states(events: Sequence[JobEvent]) -> list[tuple[JobState, int]]:
    """(state, attempt) wherever it changed."""
    told = [(event.state, event.attempt) for event in events]
    return [new for old, new in zip([None, *told], told, strict=False) if new != old]


def assert_each_once(events: Sequence[JobEvent], max_steps: int) -> None:
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    steps = [event.step for event in events if event.metrics]
    assert steps == list(range(max_steps + 1))


@pytest.fixture
def watchers() -> Iterator[list[Watcher]]:
    """Threads that must have ended."""
    started: list[Watcher] = []
    yield started
    for watcher in started:
        watcher.result()


def test_cancelled_resumed_pulled(
    material: Material,
    teacher: str,
    make_server: MakeServer,
    undisturbed: RunDirectory,
    tmp_path: Path,
) -> None:
    """The same bits as the run that nobody stopped; no step is told twice, or not at all."""
    from tests.student_trainer.tiny import curve, job

    server = make_server()
    with DistillClient(server.address) as client:
        submitted = client.submit(job(material, teacher))
        for event in client.watch(submitted.id):
            if event.step >= 6:
                break
        client.cancel(submitted.id)
        stopped = client.wait(submitted.id, timeout=200)
        assert stopped.state is JobState.CANCELLED, stopped.reason
        run = RunDirectory(server.runs / stopped.id)
        assert metrics_of(run)[-1]["step"] == stopped.step
        assert (run.checkpoints / f"step-{stopped.step:06d}").is_dir()

        client.resume(stopped.id)
        ended = client.wait(stopped.id, timeout=200)
        assert (ended.state, ended.attempt, ended.step) == (JobState.SUCCEEDED, 2, 60)
        events = list(client.watch(stopped.id))
        assert_each_once(events, 60)
        assert states(events) == [
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
        told = [{"step": event.step, **event.metrics} for event in events if event.metrics]
        assert curve(told) == curve(metrics_of(undisturbed))
        pulled = client.pull(stopped.id, tmp_path / "pulled")
    found = hashlib.sha256((pulled / "model.safetensors").read_bytes()).hexdigest()
    assert found == weights(run) == weights(undisturbed)
    assert_usable(pulled)


def assert_usable(directory: Path) -> None:
    """By transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    logits = model(**words("12+34=", return_tensors="pt", return_token_type_ids=False)).logits
    assert logits.shape == (1, 6, len(words))
    assert bool(torch.isfinite(logits).all())


@pytest.mark.slow
def test_the_server_is_killed_under_a_job(
    material: Material, teacher: str, make_server: MakeServer, watchers: list[Watcher]
) -> None:
    """The same trainer goes on; a watcher sees every event once."""
    from tests.student_trainer.tiny import job

    steps = 120
    server = make_server()
    with DistillClient(server.address) as client:
        config = job(material, teacher, max_steps=steps, checkpoint__every=50, eval__every=steps)
        submitted = client.submit(config)
        watchers.append(Watcher(server.address, submitted.id))
        eventually(lambda: client.get(submitted.id).step >= 5, 60)
        card = server.card(submitted.id)
        server.kill()
        server.start()
        assert client.get(submitted.id).state is JobState.RUNNING
        eventually(lambda: client.get(submitted.id).step > 20, 60)
        assert server.card(submitted.id) == card
        ended = client.wait(submitted.id, timeout=200)
    assert (ended.state, ended.attempt, ended.step) == (JobState.SUCCEEDED, 1, steps)
    assert not (server.runs / submitted.id / "logs" / "attempt-2").exists()
    events = watchers[0].result()
    assert_each_once(events, steps)
    assert events[-1].state is JobState.SUCCEEDED


@pytest.mark.slow
def test_the_trainer_is_killed_under_the_server(
    material: Material, teacher: str, make_server: MakeServer, undisturbed: RunDirectory
) -> None:
    """It is started again, by itself, and comes to the same bits."""
    from tests.student_trainer.tiny import curve, job

    server = make_server()
    with DistillClient(server.address) as client:
        submitted = client.submit(job(material, teacher))
        for event in client.watch(submitted.id):
            if event.step >= 6:
                os.kill(server.card(submitted.id)["child_pid"], signal.SIGKILL)
                break
        ended = client.wait(submitted.id, timeout=200)
        assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 2), ended.reason
    run = RunDirectory(server.runs / submitted.id)
    assert curve(metrics_of(run)) == curve(metrics_of(undisturbed))
    assert weights(run) == weights(undisturbed)

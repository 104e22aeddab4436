"""The server is killed and restarted; trainers and watchers continue."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clients.jobs.client import DistillClient
from clients.jobs.job import JobEvent, JobState
from clients.runs.directory import RunDirectory
from distill_server.jobs.database import open_database
from distill_server.jobs.store import Change, JobStore
from distill_server.runners.local.process import family, kill_family
from protos.errors import Unavailable
from protos.rpc.health import is_serving
from tests.distill_server.conftest import Server, eventually, job_config
from tests.distill_server.jobs.history import History


@pytest.fixture(autouse=True)
def history(tmp_path: Path) -> Iterator[History]:
    """A history that is checked when the test is over and its server is dead."""
    history = History()
    yield history
    history.check(tmp_path / "runs", slots=3)


class Watcher(threading.Thread):
    """Watches one job from its first event to its end."""

    def __init__(self, address: str, job_id: str) -> None:
        super().__init__()
        self.address, self.job_id = address, job_id
        self.events: list[JobEvent] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with DistillClient(self.address) as client:
                self.events.extend(client.watch(self.job_id))
        except Exception as error:
            self.error = error

    def result(self) -> list[JobEvent]:
        self.join(60)
        assert not self.is_alive()
        assert self.error is None
        return self.events


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_running_jobs_are_adopted(make_server: Callable[..., Server], signum: int) -> None:
    server = make_server(slots=3)
    with DistillClient(server.address) as client:
        jobs = [client.submit(job_config(f"pause=0.04 n={n}", 50)) for n in range(3)]
        watchers = [Watcher(server.address, job.id) for job in jobs for _ in range(2)]
        for job in jobs:
            eventually(lambda job=job: client.get(job.id).step >= 2)
        cards_before = [server.card(job.id) for job in jobs]
        for _ in range(3):
            code = server.kill(signum)
            assert code == (0 if signum == signal.SIGTERM else -signum)
            server.start()
        assert [server.card(job.id) for job in jobs] == cards_before
        for watcher in watchers:
            events = watcher.result()
            assert [event.seq for event in events] == list(range(1, len(events) + 1))
            steps = [(event.attempt, event.step) for event in events if event.metrics]
            assert steps == [(1, n) for n in range(1, 51)]
            assert events[-1].state is JobState.SUCCEEDED
        for job in jobs:
            assert not (server.runs / job.id / "logs" / "attempt-2").exists()


def test_a_stop_with_checkpoints(make_server: Callable[..., Server]) -> None:
    """All trainers end after a checkpoint, and the next server runs no step twice.

    With retries=0, a spent retry would fail a job.
    """
    server = make_server(slots=2, retries=0, stop_grace=600)
    with DistillClient(server.address, patience_seconds=0) as client:
        steady_job = client.submit(job_config("wait_at=6 hangs=1 every=1000", 10))
        # Reads no control.json at step 4, and so holds the server until it gets SIGTERM.
        late_job = client.submit(job_config("hang_at=4 hangs=1 every=1000", 10))
        queued_job = client.submit(job_config("queued", 3))
        eventually(lambda: client.get(steady_job.id).step == 6)
        eventually(lambda: client.get(late_job.id).step == 3)
        server.send_signal(signal.SIGTERM)
        eventually(lambda: client.get(steady_job.id).state is JobState.QUEUED)
        stopped_job = client.get(steady_job.id)
        assert stopped_job.reason == "stopped for a restart of the server"
        assert stopped_job.phase == "waits for the next server"
        assert client.get(queued_job.id).attempt == 1
        assert not is_serving(server.address)
        for refused_call in (
            lambda: client.submit(job_config()),
            lambda: client.check(job_config()),
        ):
            with pytest.raises(Unavailable, match="the server is stopping"):
                refused_call()
        os.kill(server.card(late_job.id)["child_pid"], signal.SIGTERM)
        assert server.wait() == 0
    for job in (steady_job, late_job):
        directory = server.runs / job.id / "logs" / "attempt-1"
        assert json.loads((directory / "exit.json").read_text())["code"] == 0
        assert not (server.runs / job.id / "logs" / "attempt-2").exists()
    assert not (server.runs / queued_job.id / "logs").exists()
    assert (server.runs / steady_job.id / "checkpoints" / "step-000006").is_dir()

    server.start()
    with DistillClient(server.address) as client:
        for job in (steady_job, late_job):
            ended_job = client.wait(job.id, timeout=60)
            assert (ended_job.state, ended_job.attempt) == (JobState.SUCCEEDED, 2)
            steps = [
                (event.attempt, event.step) for event in client.history(job.id) if event.metrics
            ]
            last_step = 6 if job is steady_job else 4
            assert steps == [(1 + (step > last_step), step) for step in range(1, 11)]
        assert client.wait(queued_job.id, timeout=60).attempt == 1


@pytest.mark.parametrize(("stop_grace", "signals"), [(0.1, 1), (600, 2)])
def test_a_stop_does_not_wait_for_ever(
    make_server: Callable[..., Server], stop_grace: float, signals: int
) -> None:
    """A trainer that writes no checkpoint within the grace dies with the container.

    A second signal ends the grace at once.
    """
    server = make_server(retries=0, stop_grace=stop_grace)
    with DistillClient(server.address) as client:
        job = client.submit(job_config("hang_at=8 hangs=1", max_steps=10))
        eventually(lambda: client.get(job.id).step == 7)
        card = server.card(job.id)
        if signals == 2:
            server.send_signal(signal.SIGINT)
            eventually(lambda: not is_serving(server.address))
        assert server.kill(signal.SIGTERM) == 0
        assert family(str(card["mark"]))
        os.kill(int(card["pid"]), signal.SIGKILL)
        kill_family(str(card["mark"]))
        server.start()
        ended_job = client.wait(job.id, timeout=60)
        assert (ended_job.state, ended_job.attempt) == (JobState.SUCCEEDED, 2)
        # The last checkpoint was at step 5.
        steps = [(event.attempt, event.step) for event in client.history(job.id) if event.metrics]
        assert steps == [(1, n) for n in range(1, 8)] + [(2, n) for n in range(6, 11)]


@pytest.mark.parametrize(
    ("name", "state", "reason"),
    [
        ("pause=0.02", JobState.SUCCEEDED, ""),
        ("pause=0.02 fail_at=20", JobState.FAILED, "the loss is not finite"),
    ],
)
def test_job_that_ended_meanwhile(
    server: Server, client: DistillClient, name: str, state: JobState, reason: str
) -> None:
    job = client.submit(job_config(name, max_steps=20))
    watcher = Watcher(server.address, job.id)
    directory = server.runs / job.id / "logs" / "attempt-1"
    server.card(job.id)
    server.kill()
    eventually((directory / "exit.json").exists)
    server.start()
    final_job = client.wait(job.id, timeout=20)
    assert (final_job.state, final_job.reason, final_job.attempt) == (state, reason, 1)
    steps = [event.step for event in watcher.result() if event.metrics]
    assert steps == list(range(1, 21 if state is JobState.SUCCEEDED else 20))


def test_job_whose_processes_are_gone_is_queued_again(
    server: Server, client: DistillClient
) -> None:
    """All processes were killed: a new attempt starts, and no old process is left."""
    job = client.submit(job_config("hang_at=8 hangs=1 orphan=1", max_steps=10))
    eventually(lambda: client.get(job.id).step == 7)
    card = server.card(job.id)
    server.kill()
    os.kill(int(card["pid"]), signal.SIGKILL)
    assert family(str(card["mark"]))
    server.start()
    final_job = client.wait(job.id, timeout=30)
    assert (final_job.state, final_job.attempt, final_job.step) == (JobState.SUCCEEDED, 2, 10)
    assert family(str(card["mark"])) == []


def test_reboot_costs_no_retry(server: Server, client: DistillClient) -> None:
    job = client.submit(job_config("hang_at=6 hangs=3", max_steps=10))
    for attempt in (1, 2, 3):
        card = server.card(job.id, attempt)
        server.kill()
        os.kill(int(card["pid"]), signal.SIGKILL)
        kill_family(str(card["mark"]))
        path = server.runs / job.id / "logs" / f"attempt-{attempt}" / "shim.json"
        path.write_text(json.dumps({**card, "boot_id": "of yesterday"}))
        server.start()
    final_job = client.wait(job.id, timeout=30)
    assert (final_job.state, final_job.attempt) == (JobState.SUCCEEDED, 4)


def test_job_that_was_recorded_but_not_started(server: Server, client: DistillClient) -> None:
    """The server died after it recorded the attempt and before it started the process."""
    blocker = client.submit(job_config("pause=1", max_steps=1000))
    job = client.submit(job_config())
    server.kill()
    with open_database(server.runs / "server.sqlite") as connection:
        store = JobStore(connection, on_change=lambda job_id: None)
        store.change(job.id, Change(JobState.PREPARING))
    server.start()
    eventually(lambda: client.get(job.id).attempt == 2)
    client.cancel(blocker.id, now=True)
    final_job = client.wait(job.id, timeout=20)
    assert (final_job.state, final_job.attempt) == (JobState.SUCCEEDED, 2)


def test_cancel_is_finished_by_the_next_server(server: Server, client: DistillClient) -> None:
    job = client.submit(job_config("hang_at=2 deaf=1", max_steps=9))
    eventually(lambda: client.get(job.id).step == 1)
    client.cancel(job.id, now=True)
    server.kill()
    server.start()
    final_job = client.wait(job.id, timeout=30)
    assert final_job.state is JobState.CANCELLED


def test_queue_survives(server: Server, client: DistillClient) -> None:
    ids = [
        client.submit(job_config(f"n{n}", max_steps=3), idempotency_key=f"k{n}").id
        for n in range(5)
    ]
    server.kill()
    server.start()
    repeated_ids = [
        client.submit(job_config(f"n{n}", max_steps=3), idempotency_key=f"k{n}").id
        for n in range(5)
    ]
    assert repeated_ids == ids
    for job_id in ids:
        assert client.wait(job_id, timeout=30).state is JobState.SUCCEEDED
    assert len(client.list()) == 5


def test_queue_survives_without_its_directories(server: Server, client: DistillClient) -> None:
    """A power cut may lose unsynced directories; the database has the jobs."""
    ids = [client.submit(job_config(f"n{n}", max_steps=3)).id for n in range(3)]
    server.kill()
    for job_id in ids[1:]:
        shutil.rmtree(server.runs / job_id)
    server.start()
    for job_id in ids:
        assert client.wait(job_id, timeout=30).state is JobState.SUCCEEDED
        assert RunDirectory(server.runs / job_id).config().max_steps == 3


def test_second_server_is_refused(server: Server, tmp_path: Path) -> None:
    second_server = server.launch()
    assert second_server.stdout is not None
    assert second_server.wait(20) == 2
    assert second_server.stdout.read() == ""
    second_server.stdout.close()


@pytest.mark.slow
def test_storm_of_kills(make_server: Callable[..., Server], history: History) -> None:
    """Killed while jobs are submitted and end: no job is lost, doubled or run twice."""
    server = make_server(slots=2)
    acknowledged: dict[str, str] = {}

    def submit(thread: int) -> None:
        with DistillClient(server.address, timeout=20) as client:
            for number in range(4):
                key = f"{thread}-{number}"
                while key not in acknowledged:
                    with contextlib.suppress(Unavailable):
                        config = job_config(f"pause=0.002 k={key}", 3)
                        job = client.submit(config, idempotency_key=key)
                        history.submitted(key, job.id)
                        acknowledged[key] = job.id

    threads = [threading.Thread(target=submit, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for pause in (0.05, 0.1, 0.2, 0.3, 0.0):
        time.sleep(pause)
        server.kill()
        server.start()
    for thread in threads:
        thread.join(60)
    with DistillClient(server.address) as client:
        jobs = [client.wait(job_id, timeout=60) for job_id in acknowledged.values()]
        assert {job.state for job in jobs} == {JobState.SUCCEEDED}
        assert len({job.id for job in jobs}) == 16
        assert {job.id for job in client.list()} == {job.id for job in jobs}
        for job in jobs:
            events = list(client.watch(job.id))
            assert [event.seq for event in events] == list(range(1, len(events) + 1))
            assert [event.step for event in events if event.metrics] == [1, 2, 3]
            # Attempts may be recorded without a start, but only one started.
            logs = (server.runs / job.id / "logs").glob("attempt-*/rank-0.log")
            assert sum(log.read_text().count("starts after step") for log in logs) == 1

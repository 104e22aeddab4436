"""The server dies at its commit points: acknowledged state holds, and nothing runs twice."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.jobs.client import DistillClient
from clients.jobs.job import TERMINAL, JobState
from protos.errors import Unavailable
from tests.distill_server.conftest import SCRIPTED, Server, end_attempt, eventually, job_config
from tests.distill_server.jobs.history import History
from tests.forked_python import ForkedPython

KEY = "the same key"
# Reached by a job that runs to its end.
RUNS = [
    "run-made:kill",
    "job-stored:kill",
    "start-stored:kill",
    "job-written:kill",
    "trainer-started:kill",
    "progress-stored:kill",
    "progress-stored:kill:3",
    "end-seen:kill",
    "end-stored:kill",
]
RETRIES = ["retry-stored:kill"]
CANCELS = ["trainer-told:kill", "cancel-stored:kill"]
RESUMES = ["resume-stored:kill"]
SPECS = [*RUNS, *RETRIES, *CANCELS, *RESUMES]


class ArmedServer(Server):
    """Only the first process has the failpoint armed."""

    def __init__(self, runs: Path, spec: str) -> None:
        super().__init__(runs)
        self.spec = spec
        self.deaths = 0
        self.history = History()

    def launch(self) -> subprocess.Popen[str]:
        arguments = [str(self.runs), self.host, str(self.port), str(self.slots)]
        environment = {**os.environ, "DISTILL_FAILPOINT": self.spec}
        self.spec = ""
        return ForkedPython(
            [*SCRIPTED, *arguments], stdout=subprocess.PIPE, text=True, env=environment
        )

    def rise_again(self) -> None:
        """Wait until the process is dead and start the next one."""
        assert self.process is not None
        assert self.process.stdout is not None
        assert self.process.wait(30) == -signal.SIGKILL
        self.process.stdout.close()
        self.deaths += 1
        self.start()

    def clean_up(self) -> None:
        if self.process is not None:
            self.kill()
        # The server has disposed of all but the last attempt, perhaps before the shim started.
        for logs in self.runs.glob("*/logs"):
            end_attempt(max(logs.glob("attempt-*")))

    def starts(self, job_id: str) -> list[str]:
        """Return the "starts after" lines in the logs of all attempts."""
        logs = sorted((self.runs / job_id / "logs").glob("attempt-*/rank-0.log"))
        lines = [line for log in logs for line in log.read_text().splitlines()]
        return [line for line in lines if "starts after" in line]


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ArmedServer]:
    server = ArmedServer(tmp_path / "runs", request.param)
    server.start()
    yield server
    if server.process is not None:
        with DistillClient(server.address) as client:
            names = {job.id for job in client.list(limit=100)}
        directories = {path.name for path in server.runs.iterdir() if path.is_dir()}
        assert directories - {".teachers"} == names, "no directory is left without a job"
    server.history.check(server.runs, server.slots)
    server.clean_up()


def wait_for_end(client: DistillClient, job_id: str) -> JobState:
    eventually(lambda: client.get(job_id).state in TERMINAL, 60)
    return client.get(job_id).state


def submit_job(server: ArmedServer, client: DistillClient, name: str, steps: int) -> str:
    """Submit a job; after no answer, submit it again with the same key."""
    config = job_config(name, steps)
    try:
        job = client.submit(config, idempotency_key=KEY)
    except Unavailable:
        server.rise_again()
        job = client.submit(config, idempotency_key=KEY)
    server.history.submitted(KEY, job.id)
    return job.id


def armed_with(specs: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("server", specs, indirect=True, ids=specs)


@armed_with(RUNS)
def test_a_job_that_runs(server: ArmedServer) -> None:
    with DistillClient(server.address) as client:
        job_id = submit_job(server, client, "pause=0.02", 20)
        if not server.deaths:
            server.rise_again()
        assert wait_for_end(client, job_id) is JobState.SUCCEEDED
        assert [job.id for job in client.list()] == [job_id]
    assert len(server.starts(job_id)) == 1
    assert server.deaths == 1


@armed_with(RETRIES)
def test_a_job_that_is_tried_again(server: ArmedServer) -> None:
    with DistillClient(server.address) as client:
        job_id = submit_job(server, client, "crash_at=3 crashes=1", 5)
        server.rise_again()
        assert wait_for_end(client, job_id) is JobState.SUCCEEDED
        assert client.get(job_id).attempt == 2
    assert [line.split()[1] for line in server.starts(job_id)] == ["1", "2"]


@armed_with(CANCELS)
def test_a_job_that_is_cancelled(server: ArmedServer) -> None:
    with DistillClient(server.address) as client:
        job_id = submit_job(server, client, "pause=0.05", 1000)
        eventually(lambda: client.get(job_id).step >= 1)
        with pytest.raises(Unavailable):
            client.cancel(job_id)
        server.rise_again()
        client.cancel(job_id)
        assert wait_for_end(client, job_id) is JobState.CANCELLED
    assert len(server.starts(job_id)) == 1


@armed_with(RESUMES)
def test_a_job_that_is_resumed(server: ArmedServer) -> None:
    with DistillClient(server.address) as client:
        job_id = submit_job(server, client, "short", 5)
        assert wait_for_end(client, job_id) is JobState.SUCCEEDED
        with pytest.raises(Unavailable):
            client.resume(job_id, max_steps=8)
        server.history.resumed(job_id)
        server.rise_again()
        eventually(lambda: client.get(job_id).attempt == 2)
        assert wait_for_end(client, job_id) is JobState.SUCCEEDED
        assert client.get(job_id).step == 8
    assert [line.split()[1] for line in server.starts(job_id)] == ["1", "2"]

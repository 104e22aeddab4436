"""Programs of an earlier version with those of this one: every call and every event.

The earlier version is a commit of this repository. Its programs run with the installed packages.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protos.rpc.ports import free_ports
from tests.distill_server.conftest import Server

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EARLIER = "12aa2bee"  # 2026-11-25, two schema versions before the states and ages of ListJobs

# Every call of the job server, with the names that both versions have: ADDRESS RUNS FOLDER.
JOB_CALLS = """
import dataclasses, sys
from pathlib import Path
from clients.config.on_policy import OnPolicyJob
from clients.config.tables.common import StudentConfig
from clients.config.tables.data import DataConfig
from clients.jobs.client import DistillClient
from clients.jobs.job import JobState
from protos.errors import NotFound, WrongState

address, runs, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
data = folder / "prompts.jsonl"
data.write_text('{"prompt": "1 + 1"}\\n')

def config(name, max_steps=5):
    student, table = StudentConfig(model="tiny"), DataConfig(path=str(data))
    return OnPolicyJob(student=student, data=table, name=name, max_steps=max_steps)

with DistillClient(address) as client:
    client.check(config("a"))
    client.check(config("a"), config("b"))
    (uploaded,) = client.upload([config("a")])
    assert Path(uploaded.data.path).read_bytes() == data.read_bytes()
    first = client.submit(uploaded, idempotency_key="k")
    assert client.submit(uploaded, idempotency_key="k").id == first.id
    both = client.submit_all([config("b"), config("hang_at=2 hangs=1", 50)])
    events = list(first.watch())
    assert [event.step for event in events if event.metrics] == [1, 2, 3, 4, 5], events
    assert events[-1].state is JobState.SUCCEEDED
    assert [e.seq for e in client.history(first.id)] == [e.seq for e in events]
    assert first.refresh().config_json and first.wait(60).checkpoints
    assert b"step 5" in b"".join(first.logs())
    assert b"".join(first.logs(tail_lines=1)) == b"step 5\\n"
    assert {job.id for job in client.list()} == {first.id, *(job.id for job in both)}
    assert both[0].wait(60).state is JobState.SUCCEEDED
    succeeded = [job.id for job in client.list(state=JobState.SUCCEEDED)]
    assert sorted(succeeded) == sorted([first.id, both[0].id]), succeeded
    assert client.list(limit=1, before_id=both[1].id)[0].id == both[0].id
    both[1].cancel()
    assert both[1].cancel(now=True).state in (JobState.CANCELLING, JobState.CANCELLED)
    assert both[1].wait(60).state is JobState.CANCELLED
    assert client.resume(both[1].id).attempt == 2
    both[1].cancel(now=True)
    assert both[1].wait(60).state is JobState.CANCELLED
    (runs / first.id / "export").mkdir(exist_ok=True)
    for name in ("a.txt", "b.bin"):
        (runs / first.id / "export" / name).write_bytes(name.encode() * 500_000)
    pulled = client.pull(first.id, folder / "export")
    assert (pulled / "b.bin").read_bytes() == b"b.bin" * 500_000
    step = first.refresh().checkpoints[-1]
    assert any(client.pull(first.id, folder / "step", checkpoint=step).rglob("*"))
    (runs / first.id / "environment.json").write_text("{}")
    assert (client.pull_notes(first.id, folder / "notes") / "environment.json").exists()
    assert client.pin(first.id).pinned
    try:
        client.remove(first.id)
    except WrongState as error:
        assert error.field == "job_id" and error.hint
    else:
        raise AssertionError("it is pinned")
    assert not client.pin(first.id, pinned=False).pinned
    client.remove(first.id)
    try:
        client.get(first.id)
    except NotFound:
        pass
    else:
        raise AssertionError("it was removed")
    assert list(client.teachers()) == []
print("every call works")
"""

# Every call of a teacher: ADDRESS.
TEACHER_CALLS = """
import sys
import numpy as np
from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery

rng = np.random.default_rng(0)
with TeacherClient([sys.argv[1]]) as client:
    info = client.info()
    ids = [rng.integers(0, 64, length).astype(np.int32) for length in (2, 30, 400)]
    heads = np.tile(np.arange(8, dtype=np.int32), (399, 1))
    queries = [ScoreQuery(ids[0], 1, top_k=4), ScoreQuery(ids[1], 3, top_k=8, tail_samples=2)]
    queries += [ScoreQuery(ids[2], 1, head_ids=heads), ScoreQuery(ids[2], 1, top_k=8, f32=True)]
    for query, rows in zip(queries, client.score(queries), strict=True):
        head = np.asarray(rows.head_logprobs)
        assert head.shape[0] == len(query.token_ids) - query.start, head.shape
        assert np.isfinite(head).all() and (head <= 0).all()
        print(np.round(head.astype(float).sum(), 3), rows.head_ids.sum())
"""


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The earlier version's files."""
    command = ["git", "-C", str(ROOT), "archive", EARLIER]
    archive = subprocess.run(command, capture_output=True)
    if archive.returncode:
        pytest.skip(f"this checkout has no commit {EARLIER}")
    folder = tmp_path_factory.mktemp("earlier")
    subprocess.run(["tar", "-x"], input=archive.stdout, cwd=folder, check=True)
    return folder


def environment_of(version: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(version), "OMP_NUM_THREADS": "1"}


def run_script(version: Path, script: str, *arguments: object) -> str:
    """Run the script with the packages of a version, and return its output."""
    result = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=version,
        env=environment_of(version),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


class VersionServer(Server):
    """A server with scripted trainers, of the version in a folder."""

    version = ROOT

    def launch(self) -> subprocess.Popen[str]:
        arguments = [str(self.runs), self.host, str(self.port), str(self.slots), "{}"]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.distill_server.scripted_server", *arguments],
            cwd=self.version,
            env=environment_of(self.version),
            stdout=subprocess.PIPE,
            text=True,
        )


@contextmanager
def running_server(version: Path, runs: Path) -> Iterator[VersionServer]:
    server = VersionServer(runs, slots=2)
    server.version = version
    server.start()
    try:
        yield server
    finally:
        server.clean_up()


@contextmanager
def running_teacher(version: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "teacher_service", "--engine", "fake", "--dtype", "auto"]
    command += ["--model", "vocab=64,max_length=512", "--port", str(free_ports(1)[0])]
    with subprocess.Popen(
        command, cwd=version, env=environment_of(version), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith("teacher listening on "), line
            yield line.split()[-1]
        finally:
            process.kill()


@pytest.mark.parametrize("newer", ["client", "server"])
def test_a_client_and_a_server(newer: str, earlier: Path, tmp_path: Path) -> None:
    client_version, server_version = (ROOT, earlier) if newer == "client" else (earlier, ROOT)
    with running_server(server_version, tmp_path / "runs") as server:
        output = run_script(client_version, JOB_CALLS, server.address, server.runs, tmp_path)
    assert output.splitlines()[-1] == "every call works"


@pytest.mark.parametrize("newer", ["client", "teacher"])
def test_a_client_and_a_teacher(newer: str, earlier: Path) -> None:
    client_version, teacher_version = (ROOT, earlier) if newer == "client" else (earlier, ROOT)
    with running_teacher(teacher_version) as address:
        rows = run_script(client_version, TEACHER_CALLS, address)
        same_version_rows = run_script(teacher_version, TEACHER_CALLS, address)
    assert rows == same_version_rows
    assert len(rows.splitlines()) == 4


def test_a_server_goes_on_with_the_jobs_of_an_earlier_one(earlier: Path, tmp_path: Path) -> None:
    """The database is migrated, and a trainer that the earlier server started is followed."""
    script = JOB_CALLS.partition("with DistillClient")[0]
    begin = "job = DistillClient(address).submit(config('pause=0.3', 30)); print(job.id)"
    end = "job = DistillClient(address).wait('@last', 120); print(job.id, job.state, job.attempt)"
    with running_server(earlier, tmp_path / "runs") as server:
        job_id = run_script(earlier, script + begin, server.address, server.runs, tmp_path).strip()
        server.kill()
        server.version = ROOT
        server.start()
        facts = run_script(ROOT, script + end, server.address, server.runs, tmp_path).split()
    assert facts == [job_id, "SUCCEEDED", "1"]

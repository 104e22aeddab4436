"""The same capture on a Ray cluster of this machine, one of whose two engines is killed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.runs.directory import RunDirectory
from clients.runs.launch import trainer_command
from protos.errors import ExitCode
from tests.ray_cluster import Cluster
from tests.teacher_service.capture.material import digests, job

pytest.importorskip("ray", reason="needs the extra [ray]")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Of three CPUs: one more than two engines take."""
    ray_cluster = Cluster(tmp_path_factory.mktemp("ray") / "log", 3)
    yield ray_cluster
    ray_cluster.kill()


def start(run: RunDirectory, cluster: Cluster) -> subprocess.Popen[bytes]:
    run.logs(1).mkdir(parents=True)
    with run.log_file(1).open("ab") as log:
        return subprocess.Popen(
            trainer_command(run.path, attempt=1, processes=1),
            stdout=log,
            stderr=log,
            env={**cluster.environment, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": cluster.address},
        )


def test_an_engine_is_killed(
    cluster: Cluster, data: Path, words: Path, captured_store: Path, tmp_path: Path
) -> None:
    """The other, and one in its place, go on; the store is the one of a single engine."""
    # Slow enough to be met at work; what it gives, and so its fingerprint, is the same.
    slow = {"teacher__model": "vocab=64,latency_ms=150", "method__ray": {"actors": 2}}
    run = RunDirectory.create(tmp_path / "run", job(data, words, **slow))
    process = start(run, cluster)
    deadline = time.monotonic() + 120
    while len(list(run.store.glob("*.arrow"))) < 2:
        assert process.poll() is None, run.log_file(1).read_text()
        assert time.monotonic() < deadline, run.log_file(1).read_text()
        time.sleep(0.05)
    first, _ = cluster.processes("FileScorer")
    first.kill()
    assert len(list(run.store.glob("*.arrow"))) < len(list(captured_store.glob("*.arrow")))
    assert process.wait(120) == 0, run.log_file(1).read_text()
    assert not first.is_running()
    assert digests(run.store) == digests(captured_store)


def test_more_engines_than_there_is_room_for(
    cluster: Cluster, data: Path, words: Path, tmp_path: Path
) -> None:
    run = RunDirectory.create(tmp_path / "run", job(data, words, method__ray={"actors": 3}))
    assert start(run, cluster).wait(60) == ExitCode.USAGE
    status = run.read_status()
    assert status is not None
    assert status.reason.startswith("method.ray.actors: 3 engines with 1 CPUs each do not fit")

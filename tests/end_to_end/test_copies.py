"""A run whose machine is lost goes on on another one from its copies, to the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clients.jobs.client import DistillClient
from clients.jobs.job import JobState
from clients.jobs.record import points_of
from clients.runs.best_step import best_step
from clients.runs.directory import RunDirectory
from clients.runs.metrics_follower import read_points
from protos.errors import ExitCode
from tests.end_to_end import processes
from tests.end_to_end.conftest import Once
from tests.end_to_end.forked_trainer import finish, train
from tests.end_to_end.processes import ENVIRONMENT, MakeServer, metrics_of, new_run, weights
from tests.end_to_end.test_remote_submit import as_toml
from tests.forks import Forks, fork

pytest.importorskip("moto")
from tests.object_storage import BUCKET, S3Server
from tests.object_storage import server as storage

__all__ = ["storage"]

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

pytestmark = pytest.mark.filterwarnings("default")  # moto's own

STEPS = 20


def job_of(material: Material, **changes: Any) -> Any:
    from tests.student_trainer.tiny import sft_job

    return sft_job(material, **{"max_steps": STEPS, "eval__every": 5, **changes})


@pytest.fixture(scope="session")
def undisturbed(material: Material, once: Once) -> RunDirectory:
    config = job_of(material)
    return RunDirectory(once("copied-sft", lambda path: finish(new_run(path, config))))


def attempt(
    environment: Mapping[str, str], run: RunDirectory, number: int = 1, failpoint: str = ""
) -> int | None:
    """The exit code of an attempt on a machine that has only this run directory."""
    run.logs(number).mkdir(parents=True)
    process = fork(_on_machine, dict(environment), run.path, number, failpoint)
    process.join(120)
    return process.exitcode


def _on_machine(environment: dict[str, str], path: Path, number: int, failpoint: str) -> None:
    os.environ.update(environment)
    train(path, number, 0, failpoint, None)


def assert_same(run: RunDirectory, undisturbed: RunDirectory) -> None:
    from tests.student_trainer.tiny import curve

    assert curve(metrics_of(run)) == curve(metrics_of(undisturbed))
    assert weights(run) == weights(undisturbed)


def in_second_copy(run: RunDirectory) -> str:
    """Dies at the third file after the first checkpoint is complete.

    Before it there are job.json, the files of the checkpoint and the metrics.
    """
    newest = run.checkpoint(run.checkpoint_steps()[-1])
    return f"object-sent:kill:{sum(path.is_file() for path in newest.rglob('*')) + 5}"


def assert_copied(storage: S3Server, place: str, run: RunDirectory) -> None:
    """Everything that the storage should have, byte by byte."""
    assert storage.read(f"{place}/metrics.jsonl") == run.metrics.read_bytes()
    best = best_step(read_points(run.metrics), run.checkpoint_steps())
    assert best is not None
    for root in (run.export, run.checkpoint(run.checkpoint_steps()[-1]), run.checkpoint(best)):
        for path in (path for path in root.rglob("*") if path.is_file()):
            name = path.relative_to(run.path)
            assert storage.read(f"{place}/{name}") == path.read_bytes(), name


def test_every_machine_is_lost(
    material: Material, undisturbed: RunDirectory, storage: S3Server, tmp_path: Path
) -> None:
    """Each attempt is on a new machine, and is killed: in its copies and in its steps."""
    place = f"s3://{BUCKET}/lost"
    config = job_of(material, checkpoint__copy_to=place, name="run")
    kills = ["step-done:kill:6", in_second_copy(undisturbed)]
    kills += [f"object-sent:kill:{count}" for count in (2, 4, 7)]
    for number, kill in enumerate(kills):
        run = new_run(tmp_path / f"machine-{number}", config)
        assert attempt(storage.environment, run, failpoint=kill) == -signal.SIGKILL
    last = new_run(tmp_path / "last", config)
    assert attempt(storage.environment, last) == 0, last.log_file(1).read_text()
    assert "fetching the checkpoint of step" in last.log_file(1).read_text()
    assert_same(last, undisturbed)
    assert_copied(storage, "lost/run", last)
    done = new_run(tmp_path / "done", config)
    assert attempt(storage.environment, done) == 0, "nothing is left to do but the export"
    assert_same(done, undisturbed)


def test_two_processes_go_on_as_two(material: Material, storage: S3Server, tmp_path: Path) -> None:
    """And an error of the main process ends both."""
    changes = {"train__processes": 2, "train__sharding": "fsdp2", "max_steps": 8}
    alone = finish(new_run(tmp_path / "alone", job_of(material, **changes)))
    copied = job_of(material, checkpoint__copy_to=f"s3://{BUCKET}/two", name="run", **changes)
    first = new_run(tmp_path / "first", copied.model_copy(update={"max_steps": 8}))
    assert -signal.SIGKILL in both(storage, first, in_second_copy(alone))
    second = new_run(tmp_path / "second", copied)
    assert both(storage, second) == [0, 0], second.log_file(1).read_text()
    assert "fetching the checkpoint of step" in second.log_file(1).read_text()
    assert_same(second, alone)
    assert_copied(storage, "two/run", second)
    other = copied.model_copy(update={"seed": 7})
    refused = new_run(tmp_path / "refused", other)
    assert ExitCode.USAGE in both(storage, refused), refused.log_file(1).read_text()
    assert "another seed: 0, not 7" in refused.log_file(1).read_text()


def both(storage: S3Server, run: RunDirectory, failpoint: str = "") -> list[int | None]:
    """The exit codes of two processes."""
    run.logs(1).mkdir(parents=True)
    environment = dict(storage.environment)
    group = run.logs(1) / "group"
    return Forks(2, group, _on_machine, environment, run.path, 1, failpoint).wait(120)


def test_the_run_is_taken_over(
    material: Material, undisturbed: RunDirectory, storage: S3Server, tmp_path: Path
) -> None:
    """A machine that was only cut off writes nothing more once another one goes on."""
    config = job_of(material, checkpoint__copy_to=f"s3://{BUCKET}/taken", name="run")
    slow = new_run(tmp_path / "slow", config)
    slow.logs(1).mkdir(parents=True)
    arguments = (dict(storage.environment), slow.path, 1, "step-done:sleep:1.5")
    cut_off = fork(_on_machine, *arguments)
    while not slow.checkpoint_steps():
        assert cut_off.is_alive(), slow.log_file(1).read_text()
        cut_off.join(0.05)
    fast = new_run(tmp_path / "fast", config)
    assert attempt(storage.environment, fast) == 0, fast.log_file(1).read_text()
    cut_off.join(120)
    assert cut_off.exitcode == ExitCode.WRONG_STATE
    assert "another process is writing to s3://" in slow.log_file(1).read_text()
    assert_same(fast, undisturbed)
    assert_copied(storage, "taken/run", fast)


@pytest.mark.slow
def test_from_a_terminal_to_a_server(
    material: Material,
    undisturbed: RunDirectory,
    storage: S3Server,
    make_server: MakeServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """`distill run --dir` is killed; `distill submit` of the same file goes on elsewhere."""
    keys = tmp_path / "keys"
    keys.write_text("[default]\naws_access_key_id = test\naws_secret_access_key = test\n")
    environment = {**ENVIRONMENT, "AWS_SHARED_CREDENTIALS_FILE": str(keys)}
    environment["AWS_ENDPOINT_URL"] = storage.address
    path = tmp_path / "job.toml"
    config = job_of(material, checkpoint__copy_to=f"s3://{BUCKET}/moved", name="moved")
    path.write_text(as_toml(config.model_dump(exclude_none=True, exclude_defaults=True)))
    distill = [sys.executable, "-m", "clients"]
    killed = subprocess.run(
        [*distill, "run", str(path), "--dir", str(tmp_path / "here")],
        env={**environment, "DISTILL_FAILPOINT": in_second_copy(undisturbed)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "the trainer ended by signal 9" in killed.stderr + killed.stdout, killed.stderr
    status = RunDirectory(tmp_path / "here").read_status()
    assert status is not None
    assert status.verdict == "running"
    monkeypatch.setattr(processes, "ENVIRONMENT", environment)
    server = make_server()
    told = subprocess.run(
        [*distill, "--server", server.address, "--json", "submit", str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert told.returncode == 0, told.stderr
    with DistillClient(server.address) as client:
        job = client.wait(json.loads(told.stdout)["id"], timeout=120)
        assert job.state is JobState.SUCCEEDED, job.reason
        steps = [point.step for point in points_of(job.history())]
    assert steps == [*range(STEPS + 1)], "with the steps of the lost machine"
    run = RunDirectory(server.runs / job.id)
    assert "fetching the checkpoint of step" in run.log_file(1).read_text()
    assert_same(run, undisturbed)
    assert_copied(storage, "moved/moved", run)

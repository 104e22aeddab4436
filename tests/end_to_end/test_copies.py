"""A run whose machine is lost continues on another machine from its copies, to the same bits."""

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
from clients.runs.directory import RunDirectory
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

pytestmark = pytest.mark.filterwarnings("default")  # warnings of moto

STEPS = 20


def job_of(material: Material, **changes: Any) -> Any:
    from tests.student_trainer.tiny import sft_job

    return sft_job(material, **{"max_steps": STEPS, "eval__every": 5, **changes})


@pytest.fixture(scope="session")
def undisturbed(material: Material, once: Once) -> RunDirectory:
    config = job_of(material)
    return RunDirectory(once("copied-sft", lambda path: finish(new_run(path, config))))


def run_attempt(
    environment: Mapping[str, str], run: RunDirectory, number: int = 1, failpoint: str = ""
) -> int | None:
    """Run an attempt on a machine that has only this run directory; return its exit code."""
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


def failpoint_in_second_copy(run: RunDirectory) -> str:
    """Return a failpoint that kills at the third file after the first checkpoint is complete.

    Earlier files are limits.json, job.json, the files of the checkpoint and the metrics.
    """
    newest = run.checkpoint(run.checkpoint_steps()[-1])
    return f"object-sent:kill:{sum(path.is_file() for path in newest.rglob('*')) + 6}"


@pytest.mark.slow
def test_every_machine_is_lost(
    material: Material, undisturbed: RunDirectory, storage: S3Server, tmp_path: Path
) -> None:
    """Each attempt runs on a new machine and is killed during a copy or a step."""
    place = f"s3://{BUCKET}/lost"
    config = job_of(material, checkpoint__copy_to=place, name="run")
    kills = ["step-done:kill:6", failpoint_in_second_copy(undisturbed)]
    kills += [f"object-sent:kill:{count}" for count in (2, 7)]
    for number, kill in enumerate(kills):
        run = new_run(tmp_path / f"machine-{number}", config)
        assert run_attempt(storage.environment, run, failpoint=kill) == -signal.SIGKILL
    last_run = new_run(tmp_path / "last", config)
    assert run_attempt(storage.environment, last_run) == 0, last_run.log_file(1).read_text()
    assert "fetching the checkpoint of step" in last_run.log_file(1).read_text()
    assert_same(last_run, undisturbed)
    assert not storage.wrong_copies("lost/run", last_run)
    finished_run = new_run(tmp_path / "done", config)
    assert run_attempt(storage.environment, finished_run) == 0, (
        "nothing is left to do but the export"
    )
    assert_same(finished_run, undisturbed)


@pytest.mark.slow
def test_two_processes_go_on_as_two(material: Material, storage: S3Server, tmp_path: Path) -> None:
    """Two processes resume from the copies; an error of the main process ends both."""
    changes = {"train__processes": 2, "train__sharding": "fsdp2", "max_steps": 8}
    run_without_copies = finish(new_run(tmp_path / "alone", job_of(material, **changes)))
    config = job_of(material, checkpoint__copy_to=f"s3://{BUCKET}/two", name="run", **changes)
    first_run = new_run(tmp_path / "first", config.model_copy(update={"max_steps": 8}))
    assert -signal.SIGKILL in run_two_processes(
        storage, first_run, failpoint_in_second_copy(run_without_copies)
    )
    second_run = new_run(tmp_path / "second", config)
    assert run_two_processes(storage, second_run) == [0, 0], second_run.log_file(1).read_text()
    assert "fetching the checkpoint of step" in second_run.log_file(1).read_text()
    assert_same(second_run, run_without_copies)
    assert not storage.wrong_copies("two/run", second_run)
    other_config = config.model_copy(update={"seed": 7})
    refused_run = new_run(tmp_path / "refused", other_config)
    assert ExitCode.USAGE in run_two_processes(storage, refused_run), refused_run.log_file(
        1
    ).read_text()
    assert "another seed: 0, not 7" in refused_run.log_file(1).read_text()


def run_two_processes(
    storage: S3Server, run: RunDirectory, failpoint: str = ""
) -> list[int | None]:
    """Run an attempt of two processes; return their exit codes."""
    run.logs(1).mkdir(parents=True)
    environment = dict(storage.environment)
    group = run.logs(1) / "group"
    return Forks(2, group, _on_machine, environment, run.path, 1, failpoint).wait(120)


def test_the_run_is_taken_over(
    material: Material, undisturbed: RunDirectory, storage: S3Server, tmp_path: Path
) -> None:
    """A machine that was cut off writes no more copies after another machine has taken over."""
    config = job_of(material, checkpoint__copy_to=f"s3://{BUCKET}/taken", name="run")
    slow_run = new_run(tmp_path / "slow", config)
    slow_run.logs(1).mkdir(parents=True)
    arguments = (dict(storage.environment), slow_run.path, 1, "step-done:sleep:1.5")
    slow_process = fork(_on_machine, *arguments)
    while not slow_run.checkpoint_steps():
        assert slow_process.is_alive(), slow_run.log_file(1).read_text()
        slow_process.join(0.05)
    fast_run = new_run(tmp_path / "fast", config)
    assert run_attempt(storage.environment, fast_run) == 0, fast_run.log_file(1).read_text()
    slow_process.join(120)
    assert slow_process.exitcode == ExitCode.WRONG_STATE
    assert "another process is writing to s3://" in slow_run.log_file(1).read_text()
    assert_same(fast_run, undisturbed)
    assert not storage.wrong_copies("taken/run", fast_run)


@pytest.mark.slow
def test_from_a_terminal_to_a_server(
    material: Material,
    undisturbed: RunDirectory,
    storage: S3Server,
    make_server: MakeServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """`distill run --dir` is killed; `distill submit` of the same file continues on a server."""
    keys = tmp_path / "keys"
    keys.write_text("[default]\naws_access_key_id = test\naws_secret_access_key = test\n")
    environment = {**ENVIRONMENT, "AWS_SHARED_CREDENTIALS_FILE": str(keys)}
    environment["AWS_ENDPOINT_URL"] = storage.address
    path = tmp_path / "job.toml"
    config = job_of(material, checkpoint__copy_to=f"s3://{BUCKET}/moved", name="moved")
    path.write_text(as_toml(config.model_dump(exclude_none=True, exclude_defaults=True)))
    distill = [sys.executable, "-m", "clients"]
    killed_process = subprocess.run(
        [*distill, "run", str(path), "--dir", str(tmp_path / "here")],
        env={**environment, "DISTILL_FAILPOINT": failpoint_in_second_copy(undisturbed)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "the trainer ended by signal 9" in killed_process.stderr + killed_process.stdout, (
        killed_process.stderr
    )
    status = RunDirectory(tmp_path / "here").read_status()
    assert status is not None
    assert status.verdict == "running"
    monkeypatch.setattr(processes, "ENVIRONMENT", environment)
    server = make_server()
    submit_process = subprocess.run(
        [*distill, "--server", server.address, "--json", "submit", str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert submit_process.returncode == 0, submit_process.stderr
    with DistillClient(server.address) as client:
        job = client.wait(json.loads(submit_process.stdout)["id"], timeout=120)
        assert job.state is JobState.SUCCEEDED, job.reason
        steps = [point.step for point in points_of(job.history())]
    assert steps == [*range(STEPS + 1)], "with the steps of the lost machine"
    run = RunDirectory(server.runs / job.id)
    assert "fetching the checkpoint of step" in run.log_file(1).read_text()
    assert_same(run, undisturbed)
    assert not storage.wrong_copies("moved/moved", run)

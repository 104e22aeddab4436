"""`distill run` of a job with teacher.model starts the teacher and stops it at the end."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from clients.runs.directory import RunDirectory
from tests.distill_server.conftest import eventually
from tests.end_to_end.processes import ENVIRONMENT, metrics_of, weights

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material


def run_distill(job: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    options = [word for setting in settings for word in ("--set", setting)]
    return subprocess.run(
        [sys.executable, "-m", "clients", "run", str(job), *options, "--runs", "runs"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        cwd=job.parent,
    )


@pytest.mark.slow
def test_the_same_bits_as_with_an_address(
    material: Material, undisturbed: RunDirectory, tmp_path: Path
) -> None:
    from tests.student_trainer.tiny import curve, job

    text = job(material).model_dump_json(exclude={"teacher": {"address"}}, exclude_none=True)
    file = tmp_path / "job.yaml"
    file.write_text(text)  # JSON is a subset of YAML
    teacher_settings = ["teacher.model=" + str(material.teacher), "teacher.batch_invariant=true"]
    process = run_distill(file, *teacher_settings)
    assert process.returncode == 0, process.stderr
    (path,) = (tmp_path / "runs").iterdir()
    run = RunDirectory(path)
    assert curve(metrics_of(run)) == curve(metrics_of(undisturbed))
    assert weights(run) == weights(undisturbed)
    assert "teacher listening on" in (path / "teacher.log").read_text()

    refused_process = run_distill(file, "teacher.model=/nowhere/at-all")
    assert refused_process.returncode == 2
    assert "teacher.model: no such file: /nowhere/at-all" in refused_process.stderr
    refused_process = run_distill(file, f"teacher.model={tmp_path}")
    assert refused_process.returncode == 2, refused_process.stderr
    assert "error: teacher.model: " in refused_process.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 1, "a job that is refused leaves nothing"
    assert not teachers_of(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["teacher.log", "metrics.jsonl"])
def test_a_killed_run_leaves_no_teacher(material: Material, tmp_path: Path, moment: str) -> None:
    """Killed while its teacher loads, or in a step; in a step, the trainer first ends its job."""
    from tests.student_trainer.tiny import job

    model = tmp_path / "teacher"
    shutil.copytree(material.teacher, model)
    file = tmp_path / "job.yaml"
    file.write_text(
        job(material).model_dump_json(exclude={"teacher": {"address"}}, exclude_none=True)
    )
    command = [sys.executable, "-m", "clients", "run", str(file), "--runs", "runs"]
    with subprocess.Popen(
        [*command, "--set", f"teacher.model={model}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
        cwd=tmp_path,
    ) as process:
        eventually(lambda: list(tmp_path.glob(f"runs/*/{moment}")))
        process.kill()
    # After a kill in a step, the trainer first ends its job: a minute on a busy machine.
    eventually(lambda: not teachers_of(tmp_path), seconds=200.0)
    if moment == "metrics.jsonl":
        (path,) = (tmp_path / "runs").iterdir()
        status = RunDirectory(path).read_status()
        assert status is not None
        assert status.verdict == "succeeded"


def teachers_of(path: Path) -> list[str]:
    """Return the command lines of teachers of models below a directory."""
    lines = [
        " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])
    ]
    return [line for line in lines if str(path) in line and "teacher_service" in line]

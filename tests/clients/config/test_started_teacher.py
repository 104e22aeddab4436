"""The keys of a teacher that is started for a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from clients.config.file import load_job
from clients.config.on_policy import OnPolicyJob
from clients.preflight.teachers import services_of
from clients.runs.launch import teacher_command
from clients.runs.started_services import connected, write_address
from protos.errors import InvalidInput, Unavailable

JOB = 'student.model = "s"\ndata.path = "x.jsonl"\n'
RL = 'method.type = "rl"\nreward.type = "exact_match"\n'


def write_job(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB + "".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (['teacher.model = "m"', 'teacher.address = "h:1"'], "teacher.address: has no effect"),
        (['teacher.engine = "vllm"'], "teacher.engine: has no effect: the teacher at"),
        (["teacher.batch_invariant = true"], "teacher.batch_invariant: has no effect"),
        (["teacher.gpus = 1"], "teacher.gpus: has no effect"),
        (['teachers.a = "h:1"', 'teacher.model = "m"'], "teacher.model: has no effect"),
        (
            ['teacher.model = "m"', 'teacher.engine = "vllm"', 'teacher.device = "cuda"'],
            "teacher.device: vllm uses the visible GPUs",
        ),
        (
            ['teacher.model = "m"', 'teacher.engine = "vllm"', "teacher.batch_invariant = true"],
            "teacher.batch_invariant: needs teacher.engine = 'hf'",
        ),
        (['teacher.model = "m"', "teacher.gpus = 2"], "teacher.gpus: more than one GPU needs"),
        (
            ['teacher.model = "m"', 'teacher.device = "cpu"', "teacher.gpus = 1"],
            "teacher.gpus: device = 'cpu' uses no GPU",
        ),
        (
            ['method.type = "capture"', 'teacher.model = "m"', "teacher.batch_invariant = true"],
            "teacher.batch_invariant: has no effect: the capture loads teacher.model in its own",
        ),
    ],
)
def test_keys_that_do_not_go_together(tmp_path: Path, lines: list[str], problem: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_job(write_job(tmp_path, *lines))
    assert problem in str(caught.value)


def test_the_command_and_the_gpus(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, RL, 'teacher.model = "--insecure"')).config
    teacher = job.started_teacher
    assert teacher is not None
    assert teacher.gpus_of_model == 1
    assert "--model=--insecure" in teacher_command(teacher, 0)
    assert not services_of(job)
    lines = ['teacher.model = "m"', 'teacher.engine = "vllm"', "teacher.gpus = 4"]
    teacher = load_job(write_job(tmp_path, *lines)).config.started_teacher
    assert teacher is not None
    command = teacher_command(teacher, 7, Path("tokens"))
    assert command[command.index("--tensor-parallel-size") + 1] == "4"
    assert command[-2:] == ["--token-file", "tokens"]
    cpu_job = load_job(write_job(tmp_path, 'teacher.model = "m"', 'teacher.device = "cpu"')).config
    teacher = cpu_job.started_teacher
    assert teacher is not None
    assert teacher.gpus_of_model == 0
    assert load_job(write_job(tmp_path)).config.started_teacher is None


def test_the_gpus_of_a_capture(tmp_path: Path) -> None:
    """The capture's own engine divides each layer among its GPUs, so the job reserves them."""
    lines = ['method.type = "capture"', 'teacher.model = "m"', 'teacher.engine = "vllm"']
    assert load_job(write_job(tmp_path, *lines)).config.gpus == 1
    assert load_job(write_job(tmp_path, *lines, "teacher.gpus = 8")).config.gpus == 8


def test_the_address_of_an_attempt(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, 'teacher.model = "m"', "teacher.top_k = 7")).config
    assert isinstance(job, OnPolicyJob)
    with pytest.raises(Unavailable, match=r"teacher.model: the teacher.*has not been started"):
        connected(job, tmp_path)
    write_address(tmp_path, "127.0.0.1:5")
    connected_job = connected(job, tmp_path)
    assert services_of(connected_job) == {"": "127.0.0.1:5"}
    assert isinstance(connected_job, OnPolicyJob)
    assert connected_job.teacher.top_k == 7

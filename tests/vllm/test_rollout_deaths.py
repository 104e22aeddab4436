"""The vllm rollout engine as a process of its own: what ends it, and what it takes with it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from student_trainer.rollout_client.order import WeightsVersion

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"),
    pytest.mark.timeout(600),  # a start of vLLM takes 20 s, on a machine with other work minutes
]

from tests.vllm.rollouts import RANK, AdaptedStudent, Student  # noqa: E402


@contextmanager
def engine_process(
    log: Path,
    student: Student,
    *versions: WeightsVersion,
    ranks: int = 1,
    lora_rank: int = 0,
    failpoint: str = "",
) -> Iterator[Engine]:
    directories = [str(version.directory) for version in versions]
    program = [sys.executable, "-m", "tests.vllm.rollout_process", str(ranks), str(lora_rank)]
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [*program, str(student.path), *directories],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "DISTILL_FAILPOINT": failpoint},
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


Engine = subprocess.Popen[str]


def wait_for(process: Engine, line: str) -> None:
    assert process.stdout is not None
    for output_line in process.stdout:
        if output_line.startswith(line):
            return
    raise AssertionError(f"it ended before {line!r}")


def processes_of(process: Engine) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(("name", "ranks"), [("VLLM::Worker", 2), ("VLLM::EngineCor", 1)])
def test_a_killed_child_ends_the_process_with_code_1(tmp_path: Path, name: str, ranks: int) -> None:
    student = Student(tmp_path)
    version = student.snapshot()
    log = tmp_path / "log"
    with engine_process(log, student, version, ranks=ranks) as process:
        wait_for(process, "sampled")
        processes = processes_of(process)
        next(
            child_process for child_process in processes if child_process.name().startswith(name)
        ).kill()
        assert process.wait(60) == 1
        assert "a process of vLLM died; this rollout service exits with code 1" in log.read_text()
        assert_gone(processes)


def test_a_killed_process_takes_vllm_with_it(tmp_path: Path) -> None:
    """Its processes would keep the device memory."""
    student = Student(tmp_path)
    with engine_process(tmp_path / "log", student, student.snapshot()) as process:
        wait_for(process, "sampled")
        processes = processes_of(process)
        assert processes
        process.kill()
        assert_gone(processes)


def assert_ends_at_the_second_load(process: Engine, log: Path, fault: str) -> None:
    wait_for(process, "loading 1")
    assert process.wait(60) == 1
    text = log.read_text()
    assert "the load of version 1 failed" in text
    assert fault in text
    assert "this rollout service exits with code 1; start the program again" in text


def test_a_load_that_fails_half_way_ends_the_process(tmp_path: Path) -> None:
    """A part of the weights is new then, and no one may use them."""
    student = Student(tmp_path)
    versions = [student.snapshot()]
    student.learn()
    versions.append(student.snapshot())
    log = tmp_path / "log"
    failpoint = "weight-file-read:raise:2"
    with engine_process(log, student, *versions, failpoint=failpoint) as process:
        assert_ends_at_the_second_load(process, log, "failpoint weight-file-read")


def test_an_adapter_that_vllm_does_not_take_ends_the_process(tmp_path: Path) -> None:
    """The first factor of an adapter is never zero; in vLLM it is, if its name is unknown there."""
    student = AdaptedStudent(tmp_path)
    good = student.snapshot()
    student.learn()
    name = "model.layers.1.self_attn.k_proj.lora_A.default.weight"
    student.model.get_parameter(name).data.zero_()
    log = tmp_path / "log"
    with engine_process(log, student, good, student.snapshot(), lora_rank=RANK) as process:
        assert_ends_at_the_second_load(process, log, "vLLM has taken 20 of 21 adapters")

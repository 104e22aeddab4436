"""The vllm rollout engine as a process of its own: what ends it, and what it takes with it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from student_trainer.rollout_client.order import WeightsVersion
from student_trainer.rollout_client.snapshot import seal

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"),
    pytest.mark.timeout(600),  # a start of vLLM takes 20 s, on a machine with other work minutes
]

from tests.vllm.rollouts import Student  # noqa: E402


@contextmanager
def engine_process(log: Path, student: Student, *versions: WeightsVersion) -> Iterator[Engine]:
    directories = [str(version.directory) for version in versions]
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.rollout_process", str(student.path), *directories],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


Engine = subprocess.Popen[str]


def wait_for(process: Engine, line: str) -> None:
    assert process.stdout is not None
    for found in process.stdout:
        if found.startswith(line):
            return
    raise AssertionError(f"it ended before {line!r}")


def processes_of(process: Engine) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def test_a_killed_worker_ends_the_process_with_code_1(tmp_path: Path) -> None:
    student = Student(tmp_path)
    version = student.snapshot()
    log = tmp_path / "log"
    with engine_process(log, student, version) as process:
        wait_for(process, "sampled")
        processes = processes_of(process)
        next(one for one in processes if one.name().startswith("VLLM::W")).kill()
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


def test_a_load_that_fails_half_way_ends_the_process(tmp_path: Path) -> None:
    """A part of the weights is new then, and no one may use them."""
    student = Student(tmp_path)
    version = student.snapshot()
    bad = tmp_path / "bad"
    bad.mkdir()
    weights = load_file(version.directory / "model.safetensors")
    name = "model.layers.2.mlp.down_proj.weight"
    weights[name] = weights[name].T.contiguous()  # as many weights as before
    save_file(weights, bad / "model.safetensors")
    seal(bad, number=1, dtype="float32", probe=student.probe())
    log = tmp_path / "log"
    with engine_process(log, student, version, WeightsVersion("lineage", 1, bad)) as process:
        wait_for(process, "loading 1")
        assert process.wait(60) == 1
        text = log.read_text()
        assert "the load of version 1 failed" in text
        assert "this rollout service exits with code 1, start it again" in text

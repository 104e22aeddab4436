"""The command distill-teacher: one line when ready, one sentence when not, a clean end."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery
from protos.errors import ExitCode
from tests.forked_python import run_forked
from tests.teacher_service.conftest import StartTeacher

HUB_ID = ["--model", "nobody/no-such-model"]  # tests have no hub
FAKE = ["--engine", "fake", "--model", "vocab=64"]


def run(*args: str, launched: bool = False) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "teacher_service", "--port", "0", *args]
    if launched:
        return subprocess.run(command, capture_output=True, text=True, timeout=60)
    return run_forked(command, timeout=60)


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (["--model", "/no/such/directory"], "--model"),
        (HUB_ID, "--model"),
        (["--engine", "fake", "--model", "vocab=x"], "--model"),
        (["--engine", "fake", "--model", "vocab=0"], "--model"),
        (["--engine", "fake", "--model", "vocab=9,latency_ms=-1"], "--model"),
        (["--engine", "vllm", "--model", "x"], "--engine"),
        ([*FAKE, "--host", "0.0.0.0"], "--host"),
        ([*FAKE, "--no-cache", "--redis-url", "redis://localhost:1/0"], "--redis-url"),
    ],
)
def test_a_wrong_setting_is_one_sentence(args: list[str], field: str) -> None:
    start = time.monotonic()
    process = run(*args, launched="vocab=x" in args)
    assert process.returncode == (ExitCode.UNREACHABLE if args is HUB_ID else ExitCode.USAGE)
    assert process.stdout == ""
    assert process.stderr.startswith(f"error: {field}: ")
    assert process.stderr.count("\n") == 1
    assert time.monotonic() - start < 20  # 10 s on a machine that does nothing else


def test_a_taken_port(start_teacher: StartTeacher) -> None:
    teacher = start_teacher(*FAKE)
    process = run(*FAKE, "--no-cache", "--port", str(teacher.port))
    assert process.returncode == 2
    assert process.stderr.count("\n") == 1
    assert "taken" in process.stderr
    # Told before the model is looked at.
    assert "taken" in run("--model", "/no/such/model", "--port", str(teacher.port)).stderr


def test_sigterm_finishes_what_was_asked(start_teacher: StartTeacher) -> None:
    teacher = start_teacher("--engine", "fake", "--model", "vocab=64,latency_ms=300")
    query = ScoreQuery(np.arange(9, dtype=np.int32), 1, top_k=2)
    with TeacherClient(teacher.address) as client:
        answer = client.submit(query)
        time.sleep(0.15)
        assert teacher.stop() == 0
        assert len(answer.result(1)) == 8


def test_the_disk_tier_survives_a_restart(start_teacher: StartTeacher, tmp_path: Path) -> None:
    args = [*FAKE, "--cache-dir", str(tmp_path / "rows")]
    query = ScoreQuery(np.arange(9, dtype=np.int32), 1, top_k=2)
    for hits in (0, 1):
        teacher = start_teacher(*args)
        with TeacherClient(teacher.address) as client:
            client.submit(query).result(60)
        assert teacher.stop() == 0
        assert f" hits={hits} misses={1 - hits} " in teacher.log.read_text()


def test_a_real_model_end_to_end(start_teacher: StartTeacher, tiny_model: Path) -> None:
    teacher = start_teacher("--model", str(tiny_model), "--batch-invariant", launched=True)
    tokens = np.random.default_rng(0).integers(0, 90, (20, 30)).astype(np.int32)
    score_queries = [ScoreQuery(row, 1, top_k=8) for row in tokens]
    with TeacherClient(teacher.address) as client:
        assert client.info().batch_invariant
        together = [
            future.result(60) for future in [client.submit(query) for query in score_queries]
        ]
        for query, block in zip(score_queries, together, strict=True):
            alone = client.submit(query).result(60)
            assert alone.head_logprobs.tobytes() == block.head_logprobs.tobytes()
            assert alone.tail_logmass.tobytes() == block.tail_logmass.tobytes()
    assert teacher.stop() == 0

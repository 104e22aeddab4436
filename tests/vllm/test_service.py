"""`distill-teacher --engine vllm` as a process: rows, bad requests, and every way to end."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery
from protos.errors import InvalidInput
from protos.rows.codec import RowBlock
from teacher_service.engines.hf import HfEngine
from tests.teacher_service.processes import TeacherProcess
from tests.vllm.model import MAX_LENGTH, VOCAB_SIZE, save_model

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"),
    pytest.mark.timeout(600),  # a start of vLLM takes 20 s, on a machine with other work minutes
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Tied: the head has no tensor of its own in the files.
    return save_model(tmp_path_factory.mktemp("model"), tied=True)


def options(model: Path) -> list[str]:
    return ["--engine", "vllm", "--model", str(model), "--no-cache", "--max-batch-tokens", "512"]


@contextmanager
def teacher_of(model: Path, log: Path, port: int = 0) -> Iterator[TeacherProcess]:
    # Launched: vLLM starts processes of its own, which end with a real interpreter only.
    teacher = TeacherProcess(options(model), log=log, port=port, launched=True)
    try:
        yield teacher
    finally:
        teacher.close()


def processes_of(teacher: TeacherProcess) -> list[psutil.Process]:
    return psutil.Process(teacher.process.pid).children(recursive=True)


def assert_gone(processes: Sequence[psutil.Process], seconds: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    alive = [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    assert not alive, alive


def queries(count: int, length: int) -> list[ScoreQuery]:
    rng = np.random.default_rng(count)
    ids = rng.integers(0, VOCAB_SIZE, (count, length)).astype(np.int32)
    return [ScoreQuery(row, 1, top_k=8, f32=True) for row in ids]


def assert_rows(
    blocks: Sequence[RowBlock], model: Path, score_queries: Sequence[ScoreQuery]
) -> None:
    for block, expected in zip(
        blocks, HfEngine(str(model), device="cpu").score(score_queries), strict=True
    ):
        assert isinstance(expected, RowBlock)
        np.testing.assert_array_equal(block.head_ids, expected.head_ids)
        np.testing.assert_allclose(block.head_logprobs, expected.head_logprobs, atol=1e-4)
        np.testing.assert_allclose(block.tail_logmass, expected.tail_logmass, atol=1e-4)


def test_a_service_from_start_to_sigterm(model: Path, tmp_path: Path) -> None:
    with teacher_of(model, tmp_path / "log") as teacher:
        processes = processes_of(teacher)
        assert any("VLLM" in process.name() for process in processes)
        with TeacherClient(teacher.address) as client:
            info = client.info()
            assert (info.engine, info.max_length) == ("vllm", MAX_LENGTH)
            score_queries = queries(20, 60)
            futures = [client.submit(query) for query in score_queries]
            # Bad requests in between fail by themselves.
            long = ScoreQuery(np.zeros(MAX_LENGTH + 1, np.int32), 1, top_k=2)
            outside = ScoreQuery(np.array([1, 2, VOCAB_SIZE], np.int32), 1, top_k=2)
            faults = [client.submit(query) for query in (long, outside)]
            assert_rows([future.result(120) for future in futures], model, score_queries)
            for fault, field in zip(faults, ("token_ids", "token_ids[2]"), strict=True):
                with pytest.raises(InvalidInput) as caught:
                    fault.result(60)
                assert caught.value.field == field
            # What was asked before the signal is answered.
            last = client.submit(queries(1, 200)[0])
            time.sleep(0.1)
            assert teacher.stop() == 0
            assert len(last.result(1)) == 199
        assert_gone(processes, 5)


def test_a_dead_vllm_ends_the_teacher_and_the_next_one_goes_on(model: Path, tmp_path: Path) -> None:
    """As under a supervisor. Rows come from two lives of the teacher, which is the same one."""
    score_queries = queries(400, 300)
    with (
        teacher_of(model, tmp_path / "first") as teacher,
        TeacherClient(teacher.address, patience_seconds=300) as client,
    ):
        futures = [client.submit(query) for query in score_queries]
        futures[0].result(120)
        processes = processes_of(teacher)
        next(process for process in processes if process.name().startswith("VLLM::")).kill()
        assert teacher.process.wait(20) == 1
        assert "a process of vLLM died" in teacher.log.read_text()
        assert not futures[-1].done()
        assert_gone(processes, 20)
        with teacher_of(model, tmp_path / "second", port=teacher.port) as second:
            assert_rows([future.result(120) for future in futures], model, score_queries)
            # A teacher that is killed takes vLLM with it.
            processes = processes_of(second)
            second.kill()
            assert_gone(processes, 20)


def test_vllm_that_cannot_start_is_one_sentence(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1000000")  # GiB
    process = subprocess.run(
        [sys.executable, "-m", "teacher_service", "--port", "0", *options(model)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 2
    assert process.stdout == ""
    error_lines = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert len(error_lines) == 1, process.stderr
    assert error_lines[0].startswith("error: --model: vLLM does not start with ")
    assert "--gpu-memory-share" in error_lines[0]

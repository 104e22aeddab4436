"""A capture that is killed, or meets a full disk, comes to the same bytes as one that nobody
disturbed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clients.config.capture import CaptureJob
from clients.runs.directory import RunDirectory
from protos.errors import ExitCode, WrongState
from tests.faults.conftest import REPEATS
from tests.teacher_service.capture.forking import attempt, finish
from tests.teacher_service.capture.material import capture_here, digests, job, pairs, write_lines
from tests.teacher_service.conftest import StartTeacher, start_teacher

__all__ = ["start_teacher"]

KILLS = REPEATS
NewRun = Callable[[CaptureJob], RunDirectory]


@pytest.fixture
def new_run(tmp_path: Path) -> NewRun:
    count = 0

    def make(config: CaptureJob) -> RunDirectory:
        nonlocal count
        count += 1
        return RunDirectory.create(tmp_path / f"run-{count}", config)

    return make


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.student_trainer import tiny

    return tiny.save(tiny.model(seed=1), tiny.tokenizer(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exercises of the tiny model's characters."""
    records = [
        {"prompt": f"{sum(a)}+{sum(b)}=", "answer": str(sum(a) + sum(b))} for a, b in pairs(160)
    ]
    return write_lines(tmp_path_factory.mktemp("sums") / "sums.jsonl", records)


def sums_job(sums: Path, model: Path, **changes: Any) -> CaptureJob:
    teacher = {"teacher__model": str(model), "teacher__engine": "hf", "method__shard_bytes": 400}
    return job(sums, model, **{**teacher, **changes})


def files_of(store: Path) -> int:
    return len(list(store.glob("*.arrow")))


def verdict_of(run: RunDirectory) -> tuple[str, int, int]:
    status = run.read_status()
    assert status is not None
    return status.verdict, status.step, status.max_steps


def test_killed_again_and_again(new_run: NewRun, sums: Path, model: Path) -> None:
    undisturbed, disturbed = (new_run(sums_job(sums, model)) for _ in range(2))
    assert finish(undisturbed) == 0, undisturbed.log_file(1).read_text()
    total = files_of(undisturbed.store)
    assert total >= 2 * KILLS
    steps = []
    for number in range(1, KILLS + 1):
        with attempt(disturbed, number) as child:
            child.wait_for_files(disturbed.store, number * total // (KILLS + 1))
            child.kill()
            assert child.wait() == -signal.SIGKILL
        steps.append(files_of(disturbed.store))
    assert steps == sorted(steps), "nothing that was complete is lost"
    assert steps[-1] < total
    assert finish(disturbed, KILLS + 1) == 0
    assert digests(disturbed.store) == digests(undisturbed.store)
    assert verdict_of(disturbed) == verdict_of(undisturbed) == ("succeeded", 160, 160)


@pytest.mark.parametrize("point", ["capture-file-written", "capture-file-named"])
@pytest.mark.parametrize("action", ["kill", pytest.param("raise", marks=pytest.mark.slow)])
def test_every_place_to_die(
    new_run: NewRun, data: Path, words: Path, captured_store: Path, point: str, action: str
) -> None:
    """A fault of the disk is told in a sentence; either way the next attempt ends with the same
    bytes.
    """
    run = new_run(job(data, words))
    code = finish(run, failpoint=f"{point}:{action}:3")
    if action == "kill":
        assert code == -signal.SIGKILL
    else:
        assert code == ExitCode.JOB_FAILED
        status = run.read_status()
        assert status is not None
        assert status.reason.startswith(f"cannot write {run.store}: failpoint")
        assert status.reason.endswith("free disk space, then resume the job")
    assert finish(run, 2) == 0, run.log_file(2).read_text()
    assert digests(run.store) == digests(captured_store)


def test_a_full_disk(new_run: NewRun, data: Path, words: Path) -> None:
    """Of a file that does not fit nothing is seen, and with room again the capture goes on."""
    config = job(data, words, teacher__top_k=32, method__shard_bytes=1 << 20)
    limited, free = new_run(config), new_run(config)
    assert finish(limited, file_bytes=8_000) == ExitCode.JOB_FAILED
    status = limited.read_status()
    assert status is not None
    assert (status.verdict, status.code) == ("failed", "INTERNAL")
    assert status.reason.startswith(f"cannot write {limited.store}: File too large; ")
    assert [file.name for file in limited.store.iterdir()] != []
    assert {file.name for file in limited.store.iterdir()} == {"lock", "manifest.json"}
    assert finish(limited, 2) == finish(free) == 0
    assert digests(limited.store) == digests(free.store)
    assert files_of(free.store) == 16  # a small capture is divided for several machines


def test_killed_while_a_service_scores(
    new_run: NewRun, sums: Path, model: Path, start_teacher: StartTeacher
) -> None:
    teacher = start_teacher("--model", str(model), "--batch-invariant")
    config = sums_job(sums, model, teacher__model=None, teacher__address=teacher.address)
    undisturbed, disturbed = new_run(config), new_run(config)
    assert finish(undisturbed) == 0, undisturbed.log_file(1).read_text()
    total = files_of(undisturbed.store)
    for number in (1, 2, 3):
        with attempt(disturbed, number) as child:
            child.wait_for_files(disturbed.store, number * total // 4)
            child.kill()
            assert child.wait() == -signal.SIGKILL
        assert files_of(disturbed.store) < total
    assert finish(disturbed, 4) == 0
    assert digests(disturbed.store) == digests(undisturbed.store)


@pytest.mark.parametrize("flipped", [False, True])
def test_a_damaged_file_is_made_again(
    new_run: NewRun, data: Path, words: Path, captured_store: Path, flipped: bool
) -> None:
    """One that is gone, and one with another bit in its rows, which Arrow takes."""
    run = new_run(job(data, words))
    assert finish(run) == 0
    damaged = run.store / "00000003.arrow"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content if flipped else b"")
    assert finish(run, 2) == 0
    assert "the capture writes this file and all later files again" in run.log_file(2).read_text()
    assert digests(run.store) == digests(captured_store)


def test_a_stop_is_heard(new_run: NewRun, data: Path, words: Path) -> None:
    """What is complete stays, and the next attempt goes on there."""
    run = new_run(job(data, words, teacher__model="vocab=64,latency_ms=100"))
    with attempt(run) as child:
        child.wait_for_files(run.store, 2)
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait() == 0
    assert verdict_of(run)[0] == "cancelled"
    assert 0 < files_of(run.store) < 10


def test_one_capture_a_store(new_run: NewRun, data: Path, words: Path, tmp_path: Path) -> None:
    slow = {"teacher__model": "vocab=64,latency_ms=200", "method__store": str(tmp_path / "rows")}
    with attempt(new_run(job(data, words, **slow))) as child:
        child.wait_for_files(tmp_path / "rows", 1)
        with pytest.raises(WrongState, match=f"another process is writing to {tmp_path / 'rows'}"):
            capture_here(tmp_path / "run", job(data, words, **slow))

"""A trainer whose attempt was replaced no longer writes into the run directory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from clients.runs.directory import RunDirectory
from clients.runs.fence import VARIABLE, raise_fence, require_unfenced
from clients.runs.metrics_file import MetricsLog
from clients.runs.progress import Progress
from clients.store.manifest import key_of
from clients.store.shards import StoredRows
from distill_server.runners.interface import Exited
from distill_server.runners.local.runner import LocalRunner
from distill_server.runners.machine import Share
from protos.errors import WrongState
from protos.rows.codec import RowBlock, encode_rows
from tests.distill_server.conftest import eventually, job_config


def make_progress(run: RunDirectory, attempt: int) -> Progress:
    return Progress(run, attempt=attempt, max_steps=9, main=True, terminated=lambda: False)


def test_an_old_attempt_says_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory.create(tmp_path / "run", job_config())
    monkeypatch.setenv(VARIABLE, raise_fence(run.path, 1))
    old_progress = make_progress(run, 1)
    old_progress.say("training", 3)
    assert raise_fence(run.path, 2) != raise_fence(tmp_path, 2)
    for write in (lambda: old_progress.say("saving", 4), lambda: old_progress.end("succeeded")):
        with pytest.raises(WrongState, match="attempt 1 was replaced by attempt 2"):
            write()
    status = run.read_status()
    assert status is not None
    assert (status.step, status.verdict) == (3, "running")
    monkeypatch.setenv(VARIABLE, raise_fence(run.path, 2))
    make_progress(run, 2).say("training", 1)


@pytest.mark.parametrize("fence", ["", "1:/nowhere/.attempt"])
def test_without_a_fence_all_may_write(monkeypatch: pytest.MonkeyPatch, fence: str) -> None:
    monkeypatch.setenv(VARIABLE, fence)
    require_unfenced()


def test_an_old_attempt_publishes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither if it starts late, nor if it was replaced while it wrote."""
    from student_trainer.checkpoints.atomic_directory import write_atomically

    step = tmp_path / "checkpoints" / "step-000004"
    monkeypatch.setenv(VARIABLE, raise_fence(tmp_path, 1))

    def write_late(partial: Path) -> None:
        (partial / "weights").write_text("old")
        raise_fence(tmp_path, 2)

    for _ in range(2):
        with pytest.raises(WrongState, match="attempt 1 was replaced"):
            write_atomically(step, write_late)
        assert list(step.parent.iterdir()) == []
    monkeypatch.setenv(VARIABLE, raise_fence(tmp_path, 2))
    write_atomically(step, lambda partial: None)
    assert step.is_dir()


def test_an_old_attempt_deletes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partial directory that it would delete belongs to its successor."""
    from student_trainer.checkpoints.checkpoint import delete_after, delete_old

    names = ["step-000004", "step-000008", "step-000012", ".step-000016.tmp"]
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    monkeypatch.setenv(VARIABLE, raise_fence(tmp_path, 1))
    raise_fence(tmp_path, 2)
    for delete in (delete_old, delete_after):
        with pytest.raises(WrongState, match="attempt 1 was replaced"):
            delete(tmp_path / "checkpoints", 2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == sorted(names)
    monkeypatch.setenv(VARIABLE, raise_fence(tmp_path, 2))
    delete_old(tmp_path / "checkpoints", 2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == names[1:3]


def test_an_old_attempt_adds_no_metrics_and_no_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from student_trainer.loop.evaluation import write_samples

    run = RunDirectory.create(tmp_path / "run", job_config())
    monkeypatch.setenv(VARIABLE, raise_fence(run.path, 1))
    metrics = MetricsLog(run, attempt=1, last_step=None)
    metrics.write(1, {"loss": 1.0})
    write_samples(run.samples, 1, [{"answer": "2"}])
    raise_fence(run.path, 2)
    for write in (
        lambda: metrics.write(2, {"loss": 0.5}),
        lambda: write_samples(run.samples, 1, [{"answer": "3"}]),
        # A log that is opened only now would drop the lines of its successor.
        lambda: MetricsLog(run, attempt=1, last_step=None),
    ):
        with pytest.raises(WrongState, match="attempt 1 was replaced"):
            write()
    metrics.close()
    (line,) = run.metrics.read_text().splitlines()
    assert json.loads(line) == {"attempt": 1, "step": 1, "loss": 1.0}
    assert (run.samples / "step-000001.jsonl").read_text() == '{"answer": "2"}\n'
    monkeypatch.setenv(VARIABLE, raise_fence(run.path, 2))
    MetricsLog(run, attempt=2, last_step=1).close()


def test_an_old_attempt_adds_no_file_to_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes neither another file nor an older manifest."""
    from clients.store.writer import StoreWriter

    zeros = np.zeros(2, np.float32)
    block = RowBlock(np.zeros((2, 1), np.int32), np.zeros((2, 1), np.float32), zeros, zeros)
    token_ids, encoded_rows = np.arange(3, dtype="<i4").tobytes(), encode_rows(block)
    rows = [
        StoredRows(key=key_of(n), token_ids=token_ids, start=1, rows=encoded_rows) for n in range(8)
    ]
    monkeypatch.setenv(VARIABLE, raise_fence(tmp_path, 1))
    with StoreWriter(tmp_path / "store", {}, [4, 4]) as writer:
        writer.append(rows[:4])
        raise_fence(tmp_path, 2)
        files_before = {path.name: path.read_bytes() for path in (tmp_path / "store").iterdir()}
        with pytest.raises(WrongState, match="attempt 1 was replaced"):
            writer.append(rows[4:])
    with pytest.raises(WrongState, match="attempt 1 was replaced"):
        StoreWriter(tmp_path / "store", {}, [4, 4])
    assert {path.name: path.read_bytes() for path in (tmp_path / "store").iterdir()} == files_before
    monkeypatch.setenv(VARIABLE, raise_fence(tmp_path, 2))
    with StoreWriter(tmp_path / "store", {}, [4, 4]) as writer:
        assert writer.files == 1
        writer.append(rows[4:])


def test_a_process_of_an_old_attempt_stops_at_its_next_word(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from clients.runs.directory import RunDirectory\n"
        "from clients.runs.progress import Progress\n"
        "p = Progress(RunDirectory(sys.argv[1]), attempt=1, max_steps=9, main=True,\n"
        "             terminated=lambda: False)\n"
        "for n in range(10_000):\n"
        "    p.say(str(n), n)\n"
        "    time.sleep(0.01)\n"
    )

    def command(
        run: Path, *, attempt: int, processes: int, from_step: int | None = None
    ) -> list[str]:

        return [sys.executable, "-c", code, str(run)]

    run = RunDirectory.create(tmp_path / "run", job_config())
    runner = LocalRunner(command=command)
    runner.start(run, attempt=1, processes=1, from_step=None, share=Share(1))
    eventually(lambda: run.read_status() is not None)
    (shim,) = runner._children.values()
    raise_fence(run.path, 2)
    assert shim.wait(60) == 0
    assert runner.poll(run, 1) == Exited(1)
    assert "attempt 1 was replaced" in run.log_file(1).read_text()

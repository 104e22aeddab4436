"""A trainer that outlives its attempt can write neither status nor checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from clients.fence import VARIABLE, raise_fence, require_unfenced
from clients.run_directory import RunDirectory
from clients.run_progress import Progress
from distill_server.attempts import Exited
from distill_server.machine import Share
from distill_server.runner import LocalRunner
from protos.errors import WrongState

from .conftest import eventually, job_config


def progress_of(run: RunDirectory, attempt: int) -> Progress:
    return Progress(run, attempt=attempt, max_steps=9, main=True, terminated=lambda: False)


def test_an_old_attempt_says_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory.create(tmp_path / "run", job_config())
    monkeypatch.setenv(VARIABLE, raise_fence(run.path, 1))
    old = progress_of(run, 1)
    old.say("training", 3)
    assert raise_fence(run.path, 2) != raise_fence(tmp_path, 2)
    for speak in (lambda: old.say("saving", 4), lambda: old.end("succeeded")):
        with pytest.raises(WrongState, match="attempt 1 was given up, and attempt 2 has begun"):
            speak()
    told = run.read_status()
    assert told is not None
    assert (told.step, told.verdict) == (3, "running")
    monkeypatch.setenv(VARIABLE, raise_fence(run.path, 2))
    progress_of(run, 2).say("training", 1)


@pytest.mark.parametrize("fence", ["", "1:/nowhere/.attempt"])
def test_without_a_fence_all_may_write(monkeypatch: pytest.MonkeyPatch, fence: str) -> None:
    monkeypatch.setenv(VARIABLE, fence)
    require_unfenced()


def test_an_old_attempt_publishes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when it comes late, nor when it slept while it wrote."""
    from student_trainer.checkpoint import write_whole

    step = tmp_path / "checkpoints" / "step-000004"
    monkeypatch.setenv(VARIABLE, raise_fence(tmp_path, 1))

    def slow(partial: Path) -> None:
        (partial / "weights").write_text("old")
        raise_fence(tmp_path, 2)

    for _ in range(2):
        with pytest.raises(WrongState, match="attempt 1 was given up"):
            write_whole(step, slow)
        assert list(step.parent.iterdir()) == []
    monkeypatch.setenv(VARIABLE, raise_fence(tmp_path, 2))
    write_whole(step, lambda partial: None)
    assert step.is_dir()


def test_a_process_of_an_old_attempt_stops_at_its_next_word(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from clients.run_directory import RunDirectory\n"
        "from clients.run_progress import Progress\n"
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
    assert "attempt 1 was given up" in run.log_file(1).read_text()

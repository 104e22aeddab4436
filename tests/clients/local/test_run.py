"""`clients.run` with a scripted trainer: a process of its own, its handle, interrupts."""

from __future__ import annotations

import pickle
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.config.file import replaced
from clients.config.on_policy import OnPolicyJob
from clients.jobs.job import JobState
from clients.local import run as local_run
from clients.local.run import RunHandle, run
from clients.runs.directory import Control, RunDirectory, Status
from protos.errors import InvalidInput, TimedOut, WrongState
from tests.documents import blocks

SCRIPT = Path(__file__).with_name("scripted_run.py")


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    def command(directory: Path, max_steps: int | None) -> list[str]:
        steps = [] if max_steps is None else [str(max_steps)]
        return [sys.executable, str(SCRIPT), str(directory), *steps]

    monkeypatch.setattr(local_run, "run_command", command)
    monkeypatch.chdir(tmp_path)
    yield
    assert not local_run._live_attempts, "a process is left"


def make_job(name: str, max_steps: int = 10) -> OnPolicyJob:
    values = {"student": {"model": "org/tiny"}, "data": {"path": "org/data"}}
    values["teacher"] = {"address": "localhost:1"}
    return OnPolicyJob.model_validate({**values, "name": name, "max_steps": max_steps})


def wait_for_step(job: RunHandle, step: int) -> None:
    assert any(event.step >= step for event in job.watch())


def test_a_run_and_what_its_handle_reads(tmp_path: Path) -> None:
    job = run(make_job("best=5"))
    assert job.directory.parent == tmp_path / "runs"
    assert job.state is JobState.PREPARING
    with pytest.raises(WrongState, match="wait for its end, or cancel"):
        job.resume()
    with pytest.raises(TimedOut, match="did not end within 0 s"):
        job.wait(timeout=0)
    events = [*job.watch()]
    ended = job.refresh()
    assert (ended.state, ended.step, ended.attempt) == (JobState.SUCCEEDED, 10, 1)
    assert [event.seq for event in events] == [*range(1, len(events) + 1)]
    assert [*job.history()] == events
    assert [event.step for event in events if event.metrics] == [*range(1, 11)]
    assert job.curve("eval/kl").steps.tolist() == [5]
    assert b"step 10" in b"".join(ended.logs())
    assert (ended.pull("model") / "config.json").is_file()
    assert (ended.pull("best", checkpoint="last") / "weights.bin").is_file()
    with pytest.raises(WrongState, match="is finished: 10 of 10 steps"):
        ended.resume()
    # A second run in the same process, and a longer one in the same directory.
    assert run(make_job("x", 2), directory="other").wait().directory == tmp_path / "other"
    longer = ended.resume(max_steps=12).wait()
    assert (longer.state, longer.step, longer.attempt, longer.max_steps) == ("SUCCEEDED", 12, 2, 12)
    assert longer.curve("loss").steps.tolist() == [*range(1, 13)]


def test_cancel_and_resume() -> None:
    job = run(make_job("wait_at=3 hangs=1"))
    wait_for_step(job, 3)
    job.cancel()
    job.cancel()
    cancelled = job.wait()
    assert (cancelled.state, cancelled.step) == (JobState.CANCELLED, 3)
    assert cancelled.checkpoints == (3,)
    resumed = cancelled.resume().wait()
    assert (resumed.state, resumed.step, resumed.attempt) == (JobState.SUCCEEDED, 10, 2)


def test_an_interrupt_cancels_with_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    job = run(make_job("wait_at=3"))
    wait_for_step(job, 3)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(local_run.time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            job.wait()
    cancelled = job.refresh()
    assert (cancelled.state, cancelled.checkpoints) == (JobState.CANCELLED, (3,))


def test_an_old_handle_acts_on_the_attempt_that_runs() -> None:
    old = run(make_job("wait_at=3"))
    wait_for_step(old, 3)
    with pytest.raises(WrongState, match="a RunHandle cannot be pickled"):
        pickle.dumps(old)
    old.cancel()
    old.wait()
    shutil.rmtree(old.directory / "checkpoints")  # the next attempt reaches step 3, too
    resumed = old.resume()
    with pytest.raises(WrongState, match=r"is (PREPARING|RUNNING); wait for its end, or cancel"):
        old.resume()
    wait_for_step(resumed, 3)
    assert old.cancel().attempt == 2
    assert resumed.wait().state is JobState.CANCELLED
    # An attempt of another process, such as of `distill run --resume`.
    directory = RunDirectory(old.directory)
    directory.write_status(Status(attempt=3, verdict="running"))
    directory.write_control(Control())
    with directory.held():
        with pytest.raises(WrongState, match="is running in another process"):
            old.resume()
        old.cancel(now=True)
    assert directory.read_control().stop == "now"


@pytest.mark.slow
def test_a_hanging_trainer_is_killed() -> None:
    job = run(make_job("hang_at=2 deaf=1"))
    wait_for_step(job, 1)
    job.cancel(now=True)
    killed = job.wait()
    assert (killed.state, killed.checkpoints) == (JobState.CANCELLED, ())


@pytest.mark.slow
def test_a_run_that_fails_and_one_that_dies() -> None:
    failed = run(make_job("fail_at=2")).wait()
    assert (failed.state, failed.reason) == (JobState.FAILED, "the loss is not finite")
    died = run(make_job("crash_at=2")).wait()
    assert died.state is JobState.FAILED
    assert "ended by signal 9" in (died.directory / "run.log").read_text()


def test_pull_of_a_run_that_failed_before_its_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys; print('error: the teacher does not answer'); sys.exit(5)"
    command = [sys.executable, "-S", "-c", script]
    monkeypatch.setattr(local_run, "run_command", lambda directory, max_steps: command)
    job = run(make_job("x"))
    assert job.wait().state is JobState.FAILED
    with pytest.raises(WrongState, match="failed: the teacher does not answer"):
        job.pull("model")  # the handle of the start, with the state PREPARING
    assert not Path("model").exists()


def test_the_documented_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.toml").write_text(
        'student.model = "org/tiny"\ndata.path = "org/data"\nteacher.address = "localhost:1"\n'
        "max_steps = 2\n"
    )
    (block,) = blocks("docs/python.md", "run")
    exec(block.body, {})
    assert "SUCCEEDED" in capsys.readouterr().out.splitlines()[-1]
    assert Path("trained/config.json").is_file()


def test_refusals_leave_no_directory() -> None:
    with pytest.raises(InvalidInput, match=r"student\.model: no such file"):
        run(replaced(make_job("x"), "student.model", "./none"))
    after = make_job("x").model_copy(update={"after": ("a",)})
    with pytest.raises(InvalidInput, match="only a server can start a job after other jobs"):
        run(after)
    assert not Path("runs").exists()


def test_the_end_of_the_process_stops_the_run() -> None:
    job = run(make_job("wait_at=3"))
    wait_for_step(job, 3)
    threading.Thread(target=local_run._stop_all).start()  # as atexit does
    assert job.wait().checkpoints == (3,)

"""`distill run` with a scripted trainer, which writes the files that a trainer writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clients.cli.app import main
from clients.config.on_policy import OnPolicyJob
from clients.jobs.artifacts import pull_run
from clients.jobs.job import JobEvent, JobState
from clients.jobs.record import record_of_run
from clients.local.follower import RunFollower
from clients.runs.directory import Control, RunDirectory, Status
from protos.errors import ExitCode, Unavailable, WrongState

Capture = pytest.CaptureFixture[str]
Script = Callable[[str], None]

HEAD = """
import json, sys, time
from clients.runs.directory import RunDirectory, Status
run, attempt = RunDirectory(sys.argv[1]), int(sys.argv[2])
max_steps = run.config().max_steps
def tell(verdict, phase="training", step=0, **changes):
    run.write_status(Status(attempt, verdict, phase, step, max_steps, **changes))
def log(step, **metrics):
    with run.metrics.open("a") as file:
        file.write(json.dumps({"attempt": attempt, "step": step, **metrics}) + "\\n")
tell("running", "preflight")
print("the log", flush=True)
"""


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Script:
    """Replaces the trainer's command by a script that starts with HEAD."""
    script = tmp_path / "trainer.py"

    def command(run: Path, *, attempt: int, processes: int) -> list[str]:
        return [sys.executable, str(script), str(run), str(attempt)]

    def write_script(body: str) -> None:
        script.write_text(HEAD + textwrap.dedent(body))

    monkeypatch.setattr("clients.cli.live.foreground_run.trainer_command", command)
    waiting = "clients.cli.live.foreground_teacher.wait_for_teachers"
    monkeypatch.setattr(waiting, lambda config, output: None)  # the job's teacher does not run
    return write_script


def only_run() -> RunDirectory:
    (path,) = Path("runs").iterdir()
    return RunDirectory(path)


def read_files(run: RunDirectory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}


def test_a_run_that_succeeds(
    capsys: Capture, job_file: Callable[..., str], trainer: Script
) -> None:
    trainer("""
        log(0, **{"eval/kl": 0.9, "eval/accuracy": 0.1})
        log(1, **{"loss": 0.5, "kl/teacher": 0.7})
        log(2, **{"loss": 0.4, "kl/teacher": 0.6, "eval/kl": 0.5, "eval/accuracy": 0.4})
        tell("succeeded", "", 2)
    """)
    assert main(["run", job_file(), "--name", "My Job!", "--set", "max_steps=2"]) == 0
    run = only_run()
    captured = capsys.readouterr()
    name = run.path.name
    assert name.startswith("on-policy-my-job-")
    assert captured.out == (
        f"{name} SUCCEEDED  2/2 steps  eval/accuracy 0.4  eval/kl 0.5  run runs/{name}\n"
    )
    assert (run.path / "job.toml").read_text().startswith("student.model")
    assert run.config().max_steps == 2
    assert run.log_file(1).read_text() == "the log\n"
    assert f"{name} SUCCEEDED  2/2" in captured.err


def test_a_refused_run_leaves_nothing(
    capsys: Capture, job_file: Callable[..., str], trainer: Script
) -> None:
    trainer("""
        tell("failed", "preflight", reason="no teacher at x; start one", code="UNAVAILABLE")
        sys.exit(4)
    """)
    assert main(["run", job_file()]) == ExitCode.UNREACHABLE
    assert list(Path("runs").iterdir()) == []
    assert capsys.readouterr().err.endswith("error: no teacher at x; start one\n")


def test_a_run_that_fails_later_is_kept(
    capsys: Capture, job_file: Callable[..., str], trainer: Script
) -> None:
    trainer("""
        log(1, loss=0.5)
        tell("failed", "training", 1, reason="loss is not finite", code="DATA_LOSS")
        sys.exit(1)
    """)
    assert main(["run", job_file(name="job.toml")]) == ExitCode.JOB_FAILED
    captured = capsys.readouterr()
    run = only_run()
    assert "FAILED" in captured.out
    assert "loss is not finite" in captured.out
    assert f"trainer log: {run.log_file(1)}" in captured.err
    assert f"distill run --resume {run.path}" in captured.err


def test_a_trainer_that_dies_without_a_word(
    capsys: Capture, job_file: Callable[..., str], trainer: Script
) -> None:
    trainer("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert main(["run", job_file()]) == ExitCode.JOB_FAILED
    assert "by signal 9 without a final status" in capsys.readouterr().out
    assert only_run().log_file(1).exists()


def test_an_attempt_that_died_with_another_process_says_so(
    capsys: Capture, job_file: Callable[..., str], trainer: Script
) -> None:
    trainer("""
        tell("running", "training", 1, reason="another process of the trainer has died: Read error")
        sys.exit(1)
    """)
    assert main(["run", job_file()]) == ExitCode.JOB_FAILED
    output = capsys.readouterr().out
    assert "another process of the trainer has died: Read error" in output
    assert "without a final status" not in output


def test_resume_is_a_new_attempt(
    capsys: Capture, job_file: Callable[..., str], trainer: Script
) -> None:
    trainer("""
        log(attempt, loss=0.5)
        tell("cancelled" if attempt == 1 else "succeeded", "", attempt)
    """)
    assert main(["run", job_file(), "--set", "max_steps=1"]) == ExitCode.JOB_CANCELLED
    path = str(only_run().path)
    assert main(["run", "--resume", path, "--set", "max_steps=2"]) == 0
    assert only_run().config().max_steps == 2
    assert only_run().log_file(2).exists()
    capsys.readouterr()
    assert main(["run", "--resume", path]) == ExitCode.WRONG_STATE
    assert main(["run", "--resume", "nowhere"]) == ExitCode.NOT_FOUND
    assert "is not a run directory" in capsys.readouterr().err


def test_a_directory_is_made_then_resumed_then_finished(
    capsys: Capture, job_file: Callable[..., str], trainer: Script
) -> None:
    trainer("""
        log(attempt, loss=0.5)
        tell("cancelled" if attempt == 1 else "succeeded", "", attempt)
    """)
    Path("runs/mine").mkdir(parents=True)  # an existing empty directory is allowed
    command = ["run", job_file(), "--dir", "runs/mine", "--set", "max_steps=2"]
    assert main(command) == ExitCode.JOB_CANCELLED
    assert only_run().path.name == "mine"
    assert main(command) == 0
    assert only_run().log_file(2).exists()
    capsys.readouterr()
    assert main(command) == 0
    assert capsys.readouterr().err == "the run runs/mine is finished: 2 of 2 steps\n"
    assert not only_run().log_file(3).exists()


def test_a_directory_of_another_job_is_not_resumed(
    capsys: Capture, job_file: Callable[..., str], trainer: Script
) -> None:
    trainer('tell("cancelled", "", 1)')
    job = job_file()
    command = ["run", job, "--dir", "mine", "--set", "max_steps=2"]
    assert main(command) == ExitCode.JOB_CANCELLED
    capsys.readouterr()
    assert main(["run", job, "--dir", "mine", "--set", "max_steps=3"]) == ExitCode.USAGE
    assert "--dir: mine was created with max_steps = 2, not 3" in capsys.readouterr().err
    assert main(["run", "none.toml", "--dir", "mine"]) == ExitCode.NOT_FOUND
    assert "none.toml" in capsys.readouterr().err
    assert main(["run", job, "--dir", ""]) == ExitCode.USAGE
    assert "--dir: is empty" in capsys.readouterr().err


def test_the_present_directory(
    job_file: Callable[..., str], trainer: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer('tell("succeeded", "", 1)')
    job = str(Path(job_file()).absolute())
    Path("mine").mkdir()
    monkeypatch.chdir("mine")
    assert main(["run", job, "--dir", "."]) == 0


def test_a_directory_of_something_else_is_left_alone(
    capsys: Capture, job_file: Callable[..., str]
) -> None:
    Path("mine").mkdir()
    Path("mine/file").touch()
    job = job_file()
    paths_before = sorted(Path().iterdir())
    assert main(["run", job, "--dir", "mine"]) == ExitCode.USAGE
    assert capsys.readouterr().err == (
        "error: cannot create the run directory mine: directory not empty; give a new directory\n"
    )
    assert sorted(Path().iterdir()) == paths_before
    assert main(["run", "--resume", "mine", "--dir", "mine"]) == ExitCode.USAGE
    assert "--dir: needs a job file" in capsys.readouterr().err


def test_a_run_that_fails_before_its_trainer_is_failed(
    capsys: Capture, job_file: Callable[..., str], trainer: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the record of its directory, which said RUNNING before."""
    trainer('log(1, loss=1.0)\ntell("cancelled", "", 1)')
    assert main(["run", job_file()]) == ExitCode.JOB_CANCELLED
    run = only_run()

    def refuse(config: object, output: object) -> None:
        raise Unavailable("the teacher does not answer", field="teacher.address")

    monkeypatch.setattr("clients.cli.live.foreground_teacher.wait_for_teachers", refuse)
    assert main(["run", "--resume", str(run.path)]) == ExitCode.UNREACHABLE
    job = record_of_run(run.path).job
    assert (job.state, job.attempt, job.step) == (JobState.FAILED, 2, 1)
    assert job.reason == "teacher.address: the teacher does not answer"
    with pytest.raises(WrongState, match=f"failed: {job.reason}"):
        pull_run(run.path, "model")


@pytest.mark.slow
def test_resume_leaves_a_trainer_at_work_alone(
    capsys: Capture, job_file: Callable[..., str], trainer: Script
) -> None:
    trainer('tell("cancelled", "", 1)')
    assert main(["run", job_file()]) == ExitCode.JOB_CANCELLED
    run = only_run()
    run.write_control(Control("checkpoint"))
    capsys.readouterr()
    with run.held():
        files_before = read_files(run)
        resumed = main(["run", "--resume", str(run.path), "--set", "max_steps=9"])
    assert resumed == ExitCode.WRONG_STATE
    problem = f"another program is running in {run.path}"
    assert capsys.readouterr().err == f"error: {problem}; wait for that program, or stop it\n"
    assert read_files(run) == files_before
    assert not run.logs(2).exists()


def test_a_trainer_that_finds_another_one_says_so(
    capsys: Capture, job_file: Callable[..., str], trainer: Script
) -> None:
    """Both were started at the same time; the status file belongs to the other trainer."""
    trainer("""
        run.write_status(Status(7, "running", "training", 1, max_steps))
        sys.exit(6)
    """)
    assert main(["run", job_file()]) == ExitCode.WRONG_STATE
    captured = capsys.readouterr()
    assert "FAILED  0/500 steps  another program is running in the run directory" in captured.out
    status = only_run().read_status()
    assert status is not None
    assert status.attempt == 7


def test_an_id_that_is_taken_is_not_used_again(
    job_file: Callable[..., str], trainer: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda count: "ab" * count)
    trainer('tell("cancelled", "", 1)')
    for _ in range(2):
        assert main(["run", job_file(), "--name", "x"]) == ExitCode.JOB_CANCELLED
    names = sorted(path.name for path in Path("runs").iterdir())
    assert names == ["on-policy-x-abab", "on-policy-x-abababab"]


def test_missing_files_are_found_before_the_run(
    capsys: Capture, job_file: Callable[..., str]
) -> None:
    assert main(["run", job_file(), "--set", "data.path=none.jsonl"]) == ExitCode.USAGE
    assert main(["run", job_file(), "--set", "student.model=./none"]) == ExitCode.USAGE
    error_text = capsys.readouterr().err
    assert "data.path: no such file: none.jsonl" in error_text
    assert "student.model: no such file: ./none" in error_text
    assert not Path("runs").exists()


def send_signals(is_ready: Callable[[], bool], *signals: signal.Signals) -> threading.Thread:
    def send_when_ready() -> None:
        while not is_ready():
            time.sleep(0.02)
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(0.4)

    thread = threading.Thread(target=send_when_ready)
    thread.start()
    return thread


def has_metrics() -> bool:
    return any(Path("runs").glob("*/metrics.jsonl"))


def test_ctrl_c_stops_after_a_checkpoint(
    capsys: Capture, job_file: Callable[..., str], trainer: Script
) -> None:
    trainer("""
        log(1, loss=0.5)
        while run.read_control().stop != "checkpoint":
            time.sleep(0.05)
        tell("cancelled", "", 1, reason="asked to stop")
    """)
    thread = send_signals(has_metrics, signal.SIGINT)
    assert main(["run", job_file()]) == ExitCode.INTERRUPTED
    thread.join()
    captured = capsys.readouterr()
    assert "stopping after a checkpoint; press Ctrl-C again to kill the job" in captured.err
    assert "asked to stop" in captured.out


def test_a_second_sigterm_does_not_kill(
    capsys: Capture, job_file: Callable[..., str], trainer: Script
) -> None:
    """Batch systems send SIGTERM to every process, and repeat it."""
    trainer("""
        log(1, loss=0.5)
        while run.read_control().stop != "checkpoint":
            time.sleep(0.05)
        time.sleep(1.5)
        tell("cancelled", "", 1, reason="asked to stop")
    """)
    thread = send_signals(has_metrics, signal.SIGTERM, signal.SIGTERM)
    assert main(["run", job_file()]) == ExitCode.JOB_CANCELLED
    thread.join()
    assert "asked to stop" in capsys.readouterr().out


def test_ctrl_c_twice_kills(capsys: Capture, job_file: Callable[..., str], trainer: Script) -> None:
    trainer("""
        import os
        (run.path / "pid").write_text(str(os.getpid()))
        log(1, loss=0.5)
        time.sleep(60)
    """)
    thread = send_signals(has_metrics, signal.SIGINT, signal.SIGINT)
    start_time = time.monotonic()
    assert main(["run", job_file()]) == ExitCode.INTERRUPTED
    thread.join()
    assert time.monotonic() - start_time < 20
    pid = int((only_run().path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert "killed" in capsys.readouterr().out


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    config = OnPolicyJob.model_validate({"student": {"model": "m"}, "data": {"path": "d"}})
    return RunDirectory.create(tmp_path / "run", config)


def metrics_line(attempt: int, step: int) -> str:
    return json.dumps({"attempt": attempt, "step": step, "loss": 1}) + "\n"


def steps_of(events: list[JobEvent]) -> list[tuple[int, int]]:
    return [(event.attempt, event.step) for event in events if event.metrics]


def test_follower_waits_for_whole_lines(run: RunDirectory) -> None:
    follower = RunFollower(run, 1, 10)
    assert list(follower.poll()) == []
    text = metrics_line(1, 1) + metrics_line(1, 2)
    run.metrics.write_text(text[:-5])
    assert steps_of(list(follower.poll())) == [(1, 1)]
    run.metrics.write_text(text)
    assert steps_of(list(follower.poll())) == [(1, 2)]


def test_follower_tells_the_steps_of_its_attempt_once(run: RunDirectory) -> None:
    run.metrics.write_text(metrics_line(1, 1) + metrics_line(1, 2) + metrics_line(1, 3))
    follower = RunFollower(run, 2, 10)
    assert list(follower.poll()) == []
    run.metrics.write_text(metrics_line(1, 1))
    assert list(follower.poll()) == []
    run.metrics.write_text(metrics_line(1, 1) + metrics_line(2, 2))
    assert steps_of(list(follower.poll())) == [(2, 2)]
    run.metrics.write_text(metrics_line(1, 1))
    assert list(follower.poll()) == []
    run.metrics.write_text(
        metrics_line(1, 1) + metrics_line(2, 2) + metrics_line(3, 3) + metrics_line(2, 3)
    )
    assert steps_of(list(follower.poll())) == [(2, 3)]


def test_follower_passes_over_a_damaged_line(run: RunDirectory) -> None:
    run.metrics.write_text('{"attempt": 1, "st\n{"attempt": 1, "step": 4, "loss": 0.5}\n')
    assert [event.step for event in RunFollower(run, 1, 10).poll()] == [4]


def test_follower_ignores_the_status_of_an_earlier_attempt(run: RunDirectory) -> None:
    run.write_status(Status(1, "failed", "training", 3, 10, "old"))
    follower = RunFollower(run, 2, 10)
    assert list(follower.poll()) == []
    run.write_status(Status(2, "running", "training", 3, 10))
    (event,) = follower.poll()
    assert (event.state, event.step, event.seq) == (JobState.RUNNING, 3, 1)
    run.write_status(Status(2, "running", "training", 4, 10))
    assert list(follower.poll()) == [], "a step is told by its metrics"


def test_python_m_clients_is_distill() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "clients", "lss"], capture_output=True, text=True, check=False
    )
    assert process.returncode == ExitCode.USAGE
    assert "Did you mean 'ls'" in process.stderr

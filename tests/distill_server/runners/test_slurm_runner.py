"""The runner for Slurm with a scripted cluster."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.jobs.job import JobState
from clients.runs.directory import Control, RunDirectory, Status
from clients.runs.fence import VARIABLE
from distill_server.jobs.verdict import DeadAttempt, JobEnded, verdict_of
from distill_server.runners.cluster import Cluster
from distill_server.runners.interface import CancelledInCluster, Exited, Lost, Outcome, Running
from distill_server.runners.local.process import claim, write_json
from distill_server.runners.machine import Machine, Share
from distill_server.runners.order import read_order
from distill_server.runners.slurm import jobs as slurm_jobs
from distill_server.runners.slurm import runner as slurm_runner
from distill_server.runners.slurm.jobs import (
    ListedJob,
    RefusedJob,
    SlurmJobs,
    SlurmJobState,
    UnlistedJob,
)
from distill_server.runners.slurm.rank import rank_variables, tasks_per_node
from distill_server.runners.slurm.runner import SlurmRunner
from distill_server.runners.slurm.script import check_options
from protos.errors import InvalidInput, Unavailable
from tests.distill_server.conftest import eventually

AWAY = Unavailable("Slurm cannot be reached: slurm_load_jobs error")


class ScriptedJobs:
    """A Slurm in this process. While `trouble` is set, every call raises it."""

    def __init__(self) -> None:
        self.trouble: Exception | None = None
        self.answer: SlurmJobState = UnlistedJob()
        self.submitted: list[tuple[str, str]] = []
        self.stopped: list[str] = []

    def submit(self, name: str, entrypoint: str) -> None:
        self._raise_trouble()
        self.submitted.append((name, entrypoint))
        if isinstance(self.answer, UnlistedJob):
            self.answer = ListedJob(1, "PENDING", "Priority")

    def stop(self, name: str) -> None:
        self._raise_trouble()
        self.stopped.append(name)

    def get_state(self, name: str) -> SlurmJobState:
        self._raise_trouble()
        return self.answer

    def _raise_trouble(self) -> None:
        if self.trouble is not None:
            raise self.trouble


@pytest.fixture(autouse=True)
def shorten_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_runner, "_STORAGE_SECONDS", 0.1)
    monkeypatch.setattr(slurm_runner, "_ABSENT_SECONDS", 0.1)
    monkeypatch.setattr(slurm_runner, "_RESUBMIT_SECONDS", 1e6)


@pytest.fixture
def jobs() -> Iterator[ScriptedJobs]:
    scripted_jobs = ScriptedJobs()
    yield scripted_jobs
    scripted_jobs.trouble = AWAY  # for the polling thread


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "the runs, 50%" / "on-policy-x-7f3a")
    run.path.mkdir(parents=True)
    return run


def command(run: Path, *, attempt: int, processes: int, from_step: int | None = None) -> list[str]:
    assert processes == 1
    return ["python", "-m", "trainer", str(run)]


def runner_of(jobs: ScriptedJobs, *options: str) -> SlurmRunner:
    return SlurmRunner(Cluster(jobs, "Slurm", 0.01), options, command=command)


def start(runner: SlurmRunner, run: RunDirectory) -> None:
    share = Share(cpus=5, gpus=("0", "1", "2"))
    runner.start(run, attempt=1, processes=2, from_step=None, share=share)


def wait_for_outcome(runner: SlurmRunner, run: RunDirectory, outcome: Outcome) -> None:
    eventually(lambda: runner.poll(run, 1) == outcome)


def test_the_script_has_resources_and_no_secret(
    run: RunDirectory, jobs: ScriptedJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    start(runner_of(jobs, "partition=gpu", "comment=it's a job", "exclusive"), run)
    eventually(lambda: jobs.submitted)
    ((name, script),) = jobs.submitted
    assert name.startswith("on-policy-x-7f3a-")
    assert name.endswith("-1")
    text = Path(script).read_text()
    options = [
        shlex.split(line.removeprefix("#SBATCH "))[0]
        for line in text.splitlines()
        if line.startswith("#SBATCH ")
    ]
    logs = str(run.logs(1)).replace("%", "%%")
    assert options == [
        *(f"--job-name={name}", "--no-requeue", "--export=NIL", f"--output={logs}/slurm.log"),
        *("--open-mode=append", f"--chdir={Path.cwd()}", "--ntasks=2", "--cpus-per-task=2"),
        *("--gpus-per-task=2", "--partition=gpu", "--comment=it's a job", "--exclusive"),
    ]
    order_file = run.logs(1) / "order.json"
    assert shlex.split(text.splitlines()[-1]) == [
        "exec",
        *(sys.executable, "-P", "-m", "distill_server.runners.slurm.driver", str(order_file)),
    ]
    assert "secret" not in text
    assert order_file.stat().st_mode & 0o777 == 0o600
    order = read_order(order_file)
    assert (order.processes, order.cpus, order.gpus) == (2, 2, 2)
    assert order.environment["HF_TOKEN"] == "secret"
    assert order.environment[VARIABLE] == f"1:{run.path}/.attempt"
    assert "CUDA_VISIBLE_DEVICES" not in order.environment


def test_an_attempt_from_its_queue_to_its_end(run: RunDirectory, jobs: ScriptedJobs) -> None:
    runner = runner_of(jobs)
    start(runner, run)
    wait_for_outcome(runner, run, Running("PENDING in Slurm: Priority"))
    jobs.answer = ListedJob(1, "CONFIGURING")
    wait_for_outcome(runner, run, Running("CONFIGURING in Slurm"))
    jobs.answer = ListedJob(1, "RUNNING")
    wait_for_outcome(runner, run, Running("starting on the nodes of Slurm"))
    assert claim(run.logs(1))
    (run.logs(1) / "rank-0").mkdir()
    write_json(run.logs(1) / "rank-0" / "shim.json", {})
    wait_for_outcome(runner, run, Running())
    jobs.trouble = AWAY
    wait_for_outcome(runner, run, Running(AWAY.message))
    write_json(run.logs(1) / "exit.json", {"code": 0, "terminated": False})
    assert runner.poll(run, 1) == Exited(0)  # whatever Slurm reports
    assert not (run.logs(1) / "order.json").exists()
    assert runner._cluster._followed_jobs == {}


ENDS = [
    ("PREEMPTED", Lost(True, "Slurm preempted the attempt")),
    ("NODE_FAIL", Lost(True, "a node of the attempt failed (Slurm: NODE_FAIL)")),
    ("TIMEOUT", Lost(True, "the attempt reached its time limit in Slurm")),
    ("CANCELLED", CancelledInCluster(slurm_runner._CANCELLED_IN_CLUSTER)),
    ("OUT_OF_MEMORY", Lost(False, "the attempt ran out of memory (Slurm: OUT_OF_MEMORY)")),
    ("FAILED", Exited(-9)),
    ("COMPLETED", Exited(-9)),
]


@pytest.mark.parametrize(("state", "outcome"), ENDS)
def test_slurm_says_why_a_trainer_was_stopped(
    run: RunDirectory, jobs: ScriptedJobs, state: str, outcome: Outcome
) -> None:
    """The runner has the exit code, and waits for the final state of the Slurm job."""
    runner = runner_of(jobs)
    start(runner, run)
    assert claim(run.logs(1))
    jobs.answer = ListedJob(1, "COMPLETING")
    write_json(run.logs(1) / "exit.json", {"code": -9, "terminated": True})
    wait_for_outcome(runner, run, Running("COMPLETING in Slurm"))
    jobs.answer = ListedJob(1, state)
    wait_for_outcome(runner, run, outcome)


def test_a_cancel_of_the_server_is_no_withdrawal(run: RunDirectory, jobs: ScriptedJobs) -> None:
    runner = runner_of(jobs)
    start(runner, run)
    assert claim(run.logs(1))
    run.write_control(Control("now"))
    runner.stop(run, 1, now=True)
    eventually(lambda: jobs.stopped)
    jobs.answer = ListedJob(1, "CANCELLED")
    write_json(run.logs(1) / "exit.json", {"code": -9, "terminated": True})
    wait_for_outcome(runner, run, Exited(-9))


def test_what_never_began(run: RunDirectory, jobs: ScriptedJobs) -> None:
    """The runner takes the claim, so that a late driver does nothing; the log has the output."""
    runner = runner_of(jobs)
    start(runner, run)
    jobs.answer = ListedJob(7, "FAILED", "NonZeroExitCode")
    (run.logs(1) / "slurm.log").write_text("exec: python: not found\n")
    wait_for_outcome(runner, run, Lost(False, slurm_runner._NOT_SHARED.format(state="FAILED")))
    assert not claim(run.logs(1))
    log_text = "Slurm: job 7 FAILED NonZeroExitCode\nexec: python: not found\n"
    assert run.log_file(1).read_text() == log_text


def test_a_refusal(run: RunDirectory, jobs: ScriptedJobs) -> None:
    runner = runner_of(jobs)
    jobs.answer = RefusedJob("sbatch: error: invalid partition")
    start(runner, run)
    wait_for_outcome(
        runner, run, Lost(False, "Slurm refused the job: sbatch: error: invalid partition")
    )


def test_an_absent_job_is_not_gone(
    run: RunDirectory, jobs: ScriptedJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while its processes are alive, not within a minute, and not while Slurm is away."""
    runner = runner_of(jobs)
    start(runner, run)
    wait_for_outcome(runner, run, Running("PENDING in Slurm: Priority"))
    monkeypatch.setattr(slurm_runner, "_ABSENT_SECONDS", 1e6)
    jobs.answer = UnlistedJob()
    wait_for_outcome(runner, run, Running("squeue does not list the job of this attempt"))
    jobs.trouble = AWAY
    wait_for_outcome(runner, run, Running(AWAY.message))
    monkeypatch.setattr(slurm_runner, "_ABSENT_SECONDS", -1.0)
    (run.logs(1) / "rank-0").mkdir()
    write_json(run.logs(1) / "rank-0" / "shim.json", {})
    jobs.trouble = None
    wait_for_outcome(runner, run, Running("squeue does not list the job of this attempt"))
    assert claim(run.logs(1))  # the attempt was not given up
    write_json(run.logs(1) / "rank-0" / "exit.json", {"code": 0})
    wait_for_outcome(runner, run, Lost(True, "Slurm does not know the attempt any more"))


def test_an_attempt_that_was_never_submitted(run: RunDirectory, jobs: ScriptedJobs) -> None:
    """Its server died before the submission; the next one gives it up and takes the claim."""
    run.logs(1).mkdir(parents=True)
    wait_for_outcome(runner_of(jobs), run, Lost(True, "Slurm does not know the attempt any more"))
    assert not claim(run.logs(1))


def test_a_submission_that_died_with_its_server_is_made_again(
    run: RunDirectory, jobs: ScriptedJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resubmitted once, and not if the attempt has started: then squeue only does not list it."""
    monkeypatch.setattr(slurm_runner, "_RESUBMIT_SECONDS", 0.0)
    monkeypatch.setattr(slurm_runner, "_ABSENT_SECONDS", 1e6)
    away_jobs = ScriptedJobs()
    away_jobs.trouble = AWAY
    start(runner_of(away_jobs), run)
    runner = runner_of(jobs)
    wait_for_outcome(runner, run, Running("PENDING in Slurm: Priority"))
    assert [Path(script) for _, script in jobs.submitted] == [run.logs(1) / "job.sbatch"]
    assert claim(run.logs(1))
    jobs.answer = UnlistedJob()
    other_runner = runner_of(jobs)
    for _ in range(20):
        wait_for_outcome(other_runner, run, Running("squeue does not list the job of this attempt"))
    assert len(jobs.submitted) == 1


CANCELLED = Status(1, "cancelled", step=3)


@pytest.mark.parametrize(
    ("state", "status", "outcome", "verdict"),
    [
        (
            JobState.RUNNING,
            CANCELLED,
            CancelledInCluster("why"),
            JobEnded(JobState.CANCELLED, "why"),
        ),
        (JobState.RUNNING, None, CancelledInCluster("why"), JobEnded(JobState.CANCELLED, "why")),
        (
            JobState.RUNNING,
            Status(1, "succeeded"),
            CancelledInCluster("why"),
            JobEnded(JobState.SUCCEEDED),
        ),
        (
            JobState.CANCELLING,
            CANCELLED,
            CancelledInCluster("why"),
            JobEnded(JobState.CANCELLED, "cancelled on request"),
        ),
        (JobState.RUNNING, CANCELLED, Lost(True, "why"), DeadAttempt("why", True)),
        (JobState.RUNNING, None, Lost(False, "why"), DeadAttempt("why", False)),
    ],
)
def test_verdicts(
    state: JobState,
    status: Status | None,
    outcome: Lost | CancelledInCluster,
    verdict: JobEnded | DeadAttempt,
) -> None:
    assert verdict_of(state, 3, status, outcome) == verdict


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--partition=x", "'--partition=x' is not an option of sbatch; give the long name"),
        ("partition=a\nb", "is not an option of sbatch"),
        ("requeue", "the server sets requeue itself"),
        ("ntasks=4", "the server sets ntasks itself"),
        ("job-nam=x", "the server sets job-name itself"),
    ],
)
def test_options_that_are_refused(option: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as exc_info:
        check_options([option])
    assert exc_info.value.field == "--slurm-option"


def test_variables_of_ranks() -> None:
    """The same variables as from torchrun, for three tasks on two nodes."""
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    slurm = {
        **{"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "0"},
        **{"SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2,1"},
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    }
    assert rank_variables(slurm, "4001") == {
        **{"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4001"},
    }


class Commands:
    """Scripted Slurm programs on $PATH that record their arguments."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self.calls = directory / "calls"
        self.calls.touch()
        monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
        for name in ("sbatch", "squeue", "scancel", "srun"):
            self.tell(name, "")

    def tell(self, name: str, script: str) -> None:
        program = self._directory / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> {self.calls}\n{script}\n')
        program.chmod(0o755)

    def calls_of(self, name: str) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if line.startswith(name)]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setattr(slurm_jobs, "_LISTING_SECONDS", 0.0)
    return Commands(tmp_path, monkeypatch)


def test_a_job_is_submitted_once(commands: Commands) -> None:
    """The first sbatch call times out, but squeue lists the job."""
    jobs = SlurmJobs()
    commands.tell("sbatch", "echo 'sbatch: error: Socket timed out on send/recv' >&2; exit 1")
    with pytest.raises(Unavailable, match=r"Slurm cannot be reached: .*Socket timed out"):
        jobs.submit("name-1", "script")
    commands.tell("squeue", "echo '12|PENDING|Priority|name-1'")
    jobs.submit("name-1", "script")
    assert len(commands.calls_of("sbatch")) == 1
    assert jobs.get_state("name-1") == ListedJob(12, "PENDING", "Priority")
    jobs.stop("name-1")
    assert commands.calls_of("scancel") == ["scancel 12"]
    commands.tell("squeue", "echo '12|COMPLETING|None|name-1'")
    jobs.stop("name-1")
    commands.tell("squeue", "echo '12|CANCELLED|None|name-1'")
    jobs.stop("name-1")
    assert len(commands.calls_of("scancel")) == 1


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'slurm_load_jobs error: Unable to contact' >&2; exit 1", "Unable to contact"),
        ("echo what is this", "squeue said 'what is this'"),
        ("exec sleep 60", "squeue: no answer in 0.5 s"),
    ],
)
def test_a_squeue_that_fails_says_nothing_of_jobs(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    monkeypatch.setattr(slurm_jobs, "_TIMEOUT_SECONDS", 0.5)
    commands.tell("squeue", script)
    with pytest.raises(Unavailable, match=message):
        SlurmJobs().get_state("name-1")


def test_of_two_with_one_name_the_living_one_counts(commands: Commands) -> None:
    commands.tell("squeue", "echo '12|RUNNING|None|x'; echo '13|COMPLETED|None|x'")
    assert SlurmJobs().get_state("x") == ListedJob(12, "RUNNING")


def test_a_refused_job_is_not_submitted_again(commands: Commands) -> None:
    commands.tell("sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    jobs = SlurmJobs()
    jobs.submit("name-1", "script")
    assert jobs.get_state("name-1") == RefusedJob("sbatch: error: invalid partition")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slurm"], "--slurm: sbatch is not installed on this machine; start the server on"),
        (["--slurm", "--ray", "http://x:1"], "--slurm: cannot be given with --ray"),
        (["--slurm-option", "qos=x"], "--slurm-option: needs --slurm"),
    ],
)
def test_the_program_refuses(tmp_path: Path, options: list[str], message: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "distill_server", "--runs", str(tmp_path), *options],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": str(tmp_path)},
    )
    assert process.returncode == 2
    assert process.stderr.startswith(f"error: {message}"), process.stderr


def test_engines_on_gpus_of_their_own_are_refused() -> None:
    from clients.config.on_policy import OnPolicyJob
    from tests.distill_server.conftest import job_config

    values = job_config().model_dump() | {"rollouts": {"engine": "hf", "gpus": 1, "lag": 1}}
    job = OnPolicyJob.model_validate(values)
    with pytest.raises(
        InvalidInput, match="does not support separate GPUs for rollout engines"
    ) as exc_info:
        Machine(gpus=("0", "1"), cpus=8, places_engines=False).require_room(job)
    assert exc_info.value.field == "rollouts.gpus"

"""The runner for Ray with a scripted cluster."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.config.on_policy import OnPolicyJob
from clients.runs.directory import RunDirectory
from clients.runs.fence import VARIABLE
from distill_server.runners.interface import Exited, Lost, Outcome, Running
from distill_server.runners.local.process import claim, write_json
from distill_server.runners.machine import Share
from distill_server.runners.order import take_order
from distill_server.runners.ray import runner as ray_runner
from distill_server.runners.ray.jobs import KnownRayJob, RayJobs, RayJobState, UnknownRayJob
from distill_server.runners.ray.places import ActorPlace, rank_variables, shortage
from distill_server.runners.ray.runner import RayCluster, RayRunner
from protos.auth.scoped_token import scoped_token
from protos.errors import InvalidInput, Unavailable, WrongState
from protos.extras import install_command
from tests.distill_server.conftest import eventually, job_config

AWAY = Unavailable("the Ray cluster cannot be reached")


class ScriptedJobs:
    """A cluster in this process. While `trouble` is set, every call raises it."""

    def __init__(self) -> None:
        self.trouble: Exception | None = None
        self.jobs: dict[str, KnownRayJob] = {}
        self.submitted: list[tuple[str, str]] = []
        self.stopped: list[str] = []
        self.open = False
        self.silent = threading.Event()
        self.silent.set()

    def submit(self, name: str, entrypoint: str) -> None:
        self._raise_trouble()
        self.submitted.append((name, entrypoint))
        self.jobs.setdefault(name, KnownRayJob(is_ended=False))

    def stop(self, name: str) -> None:
        self._raise_trouble()
        self.stopped.append(name)

    def get_state(self, name: str) -> RayJobState:
        self._raise_trouble()
        return self.jobs.get(name, UnknownRayJob())

    def is_open(self) -> bool:
        self._raise_trouble()
        return self.open

    def _raise_trouble(self) -> None:
        self.silent.wait()
        if self.trouble is not None:
            raise self.trouble


@pytest.fixture(autouse=True)
def shorten_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_runner, "_STORAGE_SECONDS", 0.1)
    monkeypatch.setattr("distill_server.runners.ray.runner._PAUSE_SECONDS", 0.01)


@pytest.fixture
def jobs() -> Iterator[ScriptedJobs]:
    scripted_jobs = ScriptedJobs()
    yield scripted_jobs
    scripted_jobs.silent.clear()  # polling threads block until this process ends


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "the runs" / "on-policy-x-7f3a")
    run.path.mkdir(parents=True)
    return run


def command(run: Path, *, attempt: int, processes: int, from_step: int | None = None) -> list[str]:
    assert processes == 1
    return ["python", "-m", "trainer", str(run)]


def runner_of(jobs: ScriptedJobs, **tables: Any) -> RayRunner:
    job = OnPolicyJob.model_validate(job_config().model_dump() | tables)
    return RayRunner(RayCluster(jobs), command=command, config=lambda run: job)


def start(runner: RayRunner, run: RunDirectory, attempt: int = 1) -> None:
    share = Share(cpus=5, gpus=("0", "1", "2"))
    runner.start(run, attempt=attempt, processes=2, from_step=None, share=share)


def wait_for_outcome(
    runner: RayRunner, run: RunDirectory, outcome: Outcome, attempt: int = 1
) -> None:
    eventually(lambda: runner.poll(run, attempt) == outcome)


def test_an_order_has_what_the_description_of_the_job_must_not(
    run: RunDirectory, jobs: ScriptedJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("DISTILL_TEACHER_TOKEN", "t" * 43)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    start(runner_of(jobs), run)
    eventually(lambda: jobs.submitted)
    ((name, entrypoint),) = jobs.submitted
    order_file = run.logs(1) / "order.json"
    assert name.startswith("on-policy-x-7f3a-")
    assert name.endswith("-1")
    assert shlex.split(entrypoint) == [
        *(sys.executable, "-P", "-m", "distill_server.runners.ray.driver", str(order_file))
    ]
    assert order_file.stat().st_mode & 0o777 == 0o600
    order = take_order(order_file)
    assert not order_file.exists()
    assert (order.processes, order.cpus, order.gpus) == (2, 2, 2)
    assert order.arguments == ["-m", "trainer", str(run.path)]
    assert order.environment["HF_TOKEN"] == "secret"
    assert order.environment["DISTILL_TEACHER_TOKEN"] == scoped_token("t" * 43, run.path.name, 1)
    assert order.environment[VARIABLE] == f"1:{run.path}/.attempt"
    assert order.environment["OMP_NUM_THREADS"] == "2"
    assert "CUDA_VISIBLE_DEVICES" not in order.environment


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [(("0", "1", "2", "3", "4", "5"), (1, 2, 2)), ((), (0, 2, 0)), (None, (0, 2, 0))],
    ids=["with GPUs", "resources.gpus = 0", "without --gpus"],
)
def test_rollout_engines_are_ordered_beside_the_processes(
    run: RunDirectory,
    jobs: ScriptedJobs,
    gpus: tuple[str, ...] | None,
    expected: tuple[int, int, int],
) -> None:
    """Two engines of two GPUs each; on a cluster without GPUs they take CPUs, as processes do."""
    rollouts = {"engine": "vllm", "gpus": 4, "tensor_parallel_size": 2, "lag": 1}
    runner = runner_of(jobs, rollouts=rollouts)
    share = Share(cpus=4, gpus=gpus)
    runner.start(run, attempt=1, processes=2, from_step=None, share=share)
    order = take_order(run.logs(1) / "order.json")
    assert (order.gpus, order.engines, order.engine_gpus) == expected
    assert list(order.engine_arguments) == [
        *("-P", "-m", "student_trainer.rollout_service", "--model", "tiny", "--engine", "vllm"),
        *("--dtype", "auto", "--tensor-parallel-size", "2", "--gpu-memory-share", "0.9"),
    ]


def test_engines_that_share_gpus_are_the_trainers(run: RunDirectory, jobs: ScriptedJobs) -> None:
    start(runner_of(jobs, rollouts={"lag": 1}), run)
    order = take_order(run.logs(1) / "order.json")
    assert (order.gpus, order.engines, order.engine_arguments) == (2, 0, [])


def test_two_servers_never_mean_the_same_job(tmp_path: Path, jobs: ScriptedJobs) -> None:
    for place in ("a", "b"):
        run = RunDirectory(tmp_path / place / "job-1")
        run.path.mkdir(parents=True)
        start(runner_of(jobs), run)
    eventually(lambda: len(jobs.submitted) == 2)
    assert len(jobs.jobs) == 2


def test_an_attempt_waits_runs_and_ends(run: RunDirectory, jobs: ScriptedJobs) -> None:
    runner = runner_of(jobs)
    start(runner, run)
    wait_for_outcome(runner, run, Running("waiting for the Ray cluster"))
    write_json(run.logs(1) / "waiting.json", {"for": "no node has 8 CPUs"})
    wait_for_outcome(runner, run, Running("waiting for the Ray cluster: no node has 8 CPUs"))
    rank = run.logs(1) / "rank-0"
    rank.mkdir()
    write_json(rank / "shim.json", {})
    wait_for_outcome(runner, run, Running())
    write_json(run.logs(1) / "exit.json", {"code": -11})
    assert runner.poll(run, 1) == Exited(-11)
    assert len(jobs.submitted) == 1


def test_a_cluster_that_is_silent_holds_nobody_up(run: RunDirectory, jobs: ScriptedJobs) -> None:
    """A thread hangs in a call; the server's event loop is not blocked."""
    jobs.silent.clear()
    runner = runner_of(jobs)
    start(runner, run)
    for _ in range(1000):
        assert runner.poll(run, 1) == Running("waiting for the Ray cluster")
    runner.stop(run, 1, now=False)
    jobs.silent.set()


def test_a_dashboard_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at the first call: Ray's client connects in its constructor."""
    pytest.importorskip("ray", reason="needs the extra [ray]")
    monkeypatch.setattr("distill_server.runners.ray.jobs._TIMEOUT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        jobs = RayJobs(f"http://127.0.0.1:{silent.getsockname()[1]}")
        for _ in range(2):
            with pytest.raises(Unavailable, match="cannot be reached"):
                jobs.get_state("job")


@pytest.mark.parametrize("error", [AWAY, WrongState("the Ray cluster refused the call: no token")])
def test_trouble_is_told_and_outlived(
    run: RunDirectory, jobs: ScriptedJobs, error: Unavailable | WrongState
) -> None:
    """The attempt is neither lost nor started twice, by this server or the next one."""
    runner = runner_of(jobs)
    start(runner, run)
    eventually(lambda: jobs.submitted)
    jobs.trouble = error
    for polled_runner in (runner, runner_of(jobs)):
        wait_for_outcome(polled_runner, run, Running(error.message))
    jobs.trouble = None
    wait_for_outcome(runner, run, Running("waiting for the Ray cluster"))
    assert len(jobs.submitted) == 1


def test_an_attempt_is_submitted_when_the_cluster_is_back(
    run: RunDirectory, jobs: ScriptedJobs
) -> None:
    jobs.trouble = AWAY
    runner = runner_of(jobs)
    start(runner, run)
    wait_for_outcome(runner, run, Running(AWAY.message))
    assert not jobs.submitted
    jobs.trouble = None
    eventually(lambda: jobs.submitted)


def test_a_cluster_that_forgot_is_not_the_fault_of_the_job(
    run: RunDirectory, jobs: ScriptedJobs
) -> None:
    """A late driver finds the claim; a running one is stopped by the fence of the next attempt."""
    runner = runner_of(jobs)
    start(runner, run)
    eventually(lambda: jobs.submitted)
    jobs.jobs.clear()
    wait_for_outcome(runner, run, Lost(blameless=True))
    assert not claim(run.logs(1))
    assert not (run.logs(1) / "order.json").exists()  # it has secrets
    start(runner, run, attempt=2)
    assert (run.path / ".attempt").read_text() == "2\n"


def test_a_cluster_that_refuses_from_the_start(
    run: RunDirectory, jobs: ScriptedJobs, caplog: pytest.LogCaptureFixture
) -> None:
    """The job's phase has the reason, and the log has it once."""
    jobs.trouble = WrongState("the Ray cluster refused the call: no token")
    runner = runner_of(jobs)
    start(runner, run)
    wait_for_outcome(runner, run, Running("the Ray cluster refused the call: no token"))
    jobs.trouble = None
    eventually(lambda: jobs.submitted)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert caplog.messages[0].startswith("the Ray cluster refused the call: no token; ")


def test_a_run_directory_that_somebody_removed(run: RunDirectory, jobs: ScriptedJobs) -> None:
    runner = runner_of(jobs)
    start(runner, run)
    eventually(lambda: jobs.submitted)
    shutil.rmtree(run.path)
    jobs.jobs[jobs.submitted[0][0]] = KnownRayJob(is_ended=True, code=1)
    wait_for_outcome(runner, run, Lost(blameless=False))


def test_a_server_that_died_before_it_submitted(run: RunDirectory, jobs: ScriptedJobs) -> None:
    wait_for_outcome(runner_of(jobs), run, Lost(blameless=True))  # not even a directory
    run.logs(1).mkdir(parents=True)
    wait_for_outcome(runner_of(jobs), run, Lost(blameless=True))
    assert not claim(run.logs(1))


@pytest.mark.parametrize(
    ("answer", "claimed", "outcome"),
    [
        (KnownRayJob(True, -9, "killed"), True, Exited(-9)),
        (KnownRayJob(True, None, "the supervisor died"), True, Lost(blameless=False)),
        (KnownRayJob(True, 1, "No module named distill_server"), False, Lost(blameless=False)),
    ],
)
def test_a_driver_that_ended_without_a_word(
    run: RunDirectory, jobs: ScriptedJobs, answer: KnownRayJob, claimed: bool, outcome: Outcome
) -> None:
    """Ray's message is in the attempt's log."""
    runner = runner_of(jobs)
    start(runner, run)
    eventually(lambda: jobs.submitted)
    if claimed:
        claim(run.logs(1))
    jobs.jobs[jobs.submitted[0][0]] = answer
    wait_for_outcome(runner, run, outcome)
    assert run.log_file(1).read_text() == f"Ray: {answer.message}\n"


def test_stop(run: RunDirectory, jobs: ScriptedJobs) -> None:
    runner = runner_of(jobs)
    start(runner, run)
    eventually(lambda: jobs.submitted)
    runner.stop(run, 1, now=True)
    runner.stop(run, 1, now=True)
    eventually(lambda: jobs.stopped)
    assert set(jobs.stopped) == {jobs.submitted[0][0]}


def test_what_was_stopped_before_it_was_submitted_never_is(
    run: RunDirectory, jobs: ScriptedJobs
) -> None:
    jobs.trouble = AWAY
    runner = runner_of(jobs)
    start(runner, run)
    runner.stop(run, 1, now=False)
    jobs.trouble = None
    wait_for_outcome(runner, run, Lost(blameless=True))
    assert not jobs.submitted


def test_a_cluster_that_nobody_asks_is_not_said_to_be_back(
    run: RunDirectory, jobs: ScriptedJobs, caplog: pytest.LogCaptureFixture
) -> None:
    runner = runner_of(jobs)
    start(runner, run)
    eventually(lambda: jobs.submitted)
    jobs.trouble = AWAY
    wait_for_outcome(runner, run, Running(AWAY.message))
    write_json(run.logs(1) / "exit.json", {"code": 0})
    assert runner.poll(run, 1) == Exited(0)
    time.sleep(0.2)  # twenty rounds
    assert len(caplog.messages) == 1
    jobs.trouble = None
    start(runner, run, attempt=2)
    eventually(lambda: len(caplog.messages) == 2)


def test_what_ended_is_asked_about_no_more(run: RunDirectory, jobs: ScriptedJobs) -> None:
    runner = runner_of(jobs)
    start(runner, run)
    write_json(run.logs(1) / "exit.json", {"code": 0})
    assert runner.poll(run, 1) == Exited(0)
    assert runner._cluster._followed_jobs == {}


def test_a_cluster_that_is_open_to_all_is_warned_of_once(
    run: RunDirectory, jobs: ScriptedJobs, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has one line each for the warning, the loss and the return of the cluster."""
    jobs.open = True
    runner = runner_of(jobs)
    start(runner, run)
    eventually(lambda: jobs.submitted)
    jobs.trouble = AWAY
    wait_for_outcome(runner, run, Running(AWAY.message))
    jobs.trouble = None
    wait_for_outcome(runner, run, Running("waiting for the Ray cluster"))
    eventually(lambda: len(caplog.messages) == 3)
    assert [re.split("[:;]", message)[0] for message in caplog.messages] == [
        "the Ray cluster requires no token",
        "the Ray cluster cannot be reached",
        "the Ray cluster can be reached again",
    ]


@pytest.mark.parametrize(
    "address", ["", "auto", "10.0.0.1:8265", "ray://head:10001", "http://", "http://["]
)
def test_addresses(address: str) -> None:
    with pytest.raises(InvalidInput, match="is not the URL of a Ray dashboard") as exc_info:
        RayJobs(address)
    assert exc_info.value.field == "--ray"


def test_without_ray_there_is_a_sentence() -> None:
    """--ray without Ray is one error message."""
    code = (
        "import sys, runpy, importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'ray' else find(name, *a)\n"
        "sys.argv = ['distill-server', '--ray', 'http://127.0.0.1:1']\n"
        "runpy.run_module('distill_server', run_name='__main__')"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 2
    assert process.stderr == f"error: --ray: Ray is not installed; {install_command('ray')}\n"


def test_variables_of_ranks() -> None:
    """The same variables as from torchrun, for three processes on two nodes."""
    places = [
        ActorPlace("a", "10.0.0.1", ("2", "3"), 4001),
        ActorPlace("a", "10.0.0.1", ("5", "6"), 4002),
        ActorPlace("b", "10.0.0.2", ("0", "1"), 4003),
    ]
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4001"}
    first_node = {**common, "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "2,3,5,6"}
    assert rank_variables(places) == [
        {**first_node, "RANK": "0", "LOCAL_RANK": "0"},
        {**first_node, "RANK": "1", "LOCAL_RANK": "1"},
        {
            **common,
            **{"RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            "CUDA_VISIBLE_DEVICES": "0,1",
        },
    ]
    # A single process is no group and sees no GPU that it was not assigned.
    assert rank_variables([ActorPlace("a", "10.0.0.1", (), 4001)]) == [{"CUDA_VISIBLE_DEVICES": ""}]


@pytest.mark.parametrize(
    ("bundles", "why"),
    [
        ([{"CPU": 8, "GPU": 0}], "no node has 8 CPUs"),
        ([{"CPU": 2, "GPU": 1}], "no node has 2 CPUs and 1 GPU"),
        ([{"CPU": 2, "GPU": 0}] * 3, "no room for 3 x (2 CPUs)"),
        (
            [{"CPU": 2, "GPU": 0}, {"CPU": 1, "GPU": 2}],
            "no room for 1 x (2 CPUs) and 1 x (1 CPU and 2 GPUs)",
        ),
    ],
)
def test_what_processes_without_places_lack(bundles: list[dict[str, float]], why: str) -> None:
    nodes = [{"CPU": 4.0, "memory": 1e9}, {"CPU": 1.0, "GPU": 2.0}]
    assert shortage(bundles, nodes) == why

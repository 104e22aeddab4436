"""What needs no Ray of the runner for Ray: a cluster that answers as the test says."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clients.fence import VARIABLE, raise_fence
from clients.run_directory import RunDirectory
from distill_server import living_shims, ray_runner
from distill_server.attempts import Exited, Lost, Outcome, Running
from distill_server.living_shims import LivingShims, attempts_before
from distill_server.machine import Share
from distill_server.process import claim, family, kill_family, send_signal, write_json
from distill_server.ray_cluster import RayCluster
from distill_server.ray_jobs import Absent, Answer, Present, RayJobs
from distill_server.ray_order import take_order
from distill_server.ray_places import Place, rank_variables
from distill_server.ray_runner import RayRunner
from distill_server.shim_files import card_of, exit_code_of
from protos.errors import InvalidInput, Unavailable, WrongState
from protos.scoped_token import scoped_token

from .conftest import eventually

AWAY = Unavailable("the Ray cluster cannot be reached")


class ScriptedJobs:
    """A cluster in this process. While `trouble` is set, it has just that to say."""

    def __init__(self) -> None:
        self.trouble: Exception | None = None
        self.jobs: dict[str, Present] = {}
        self.submitted: list[tuple[str, str]] = []
        self.stopped: list[str] = []
        self.open = False
        self.silent = threading.Event()
        self.silent.set()

    def submit(self, name: str, entrypoint: str) -> None:
        self._speak()
        self.submitted.append((name, entrypoint))
        self.jobs.setdefault(name, Present(ended=False))

    def stop(self, name: str) -> None:
        self._speak()
        self.stopped.append(name)

    def look(self, name: str) -> Answer:
        self._speak()
        return self.jobs.get(name, Absent())

    def is_open(self) -> bool:
        return self.open

    def _speak(self) -> None:
        self.silent.wait()
        if self.trouble is not None:
            raise self.trouble


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_runner, "_STORAGE_SECONDS", 0.1)
    monkeypatch.setattr("distill_server.ray_cluster._PAUSE_SECONDS", 0.01)


@pytest.fixture
def jobs() -> Iterator[ScriptedJobs]:
    made = ScriptedJobs()
    yield made
    made.silent.clear()  # the threads that ask wait for the end of this process


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "the runs" / "on-policy-x-7f3a")
    run.path.mkdir(parents=True)
    return run


def command(run: Path, *, attempt: int, processes: int, from_step: int | None = None) -> list[str]:
    assert processes == 1
    return ["python", "-m", "trainer", str(run)]


def runner_of(jobs: ScriptedJobs) -> RayRunner:
    return RayRunner(RayCluster(jobs), command=command)


def start(runner: RayRunner, run: RunDirectory, attempt: int = 1) -> None:
    share = Share(cpus=5, gpus=("0", "1", "2"))
    runner.start(run, attempt=attempt, processes=2, from_step=None, share=share)


def comes(runner: RayRunner, run: RunDirectory, outcome: Outcome, attempt: int = 1) -> None:
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
        *(sys.executable, "-m", "distill_server.ray_driver", str(order_file))
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
    comes(runner, run, Running("waiting for the Ray cluster"))
    rank = run.logs(1) / "rank-0"
    rank.mkdir()
    write_json(rank / "shim.json", {})
    comes(runner, run, Running())
    write_json(run.logs(1) / "exit.json", {"code": -11})
    assert runner.poll(run, 1) == Exited(-11)
    assert len(jobs.submitted) == 1


def test_a_cluster_that_is_silent_holds_nobody_up(run: RunDirectory, jobs: ScriptedJobs) -> None:
    """The thread hangs in a call; the loop of the server gets its answers."""
    jobs.silent.clear()
    runner = runner_of(jobs)
    start(runner, run)
    for _ in range(1000):
        assert runner.poll(run, 1) == Running("waiting for the Ray cluster")
    runner.stop(run, 1, now=False)
    jobs.silent.set()


@pytest.mark.parametrize("error", [AWAY, WrongState("the Ray cluster refuses: no token")])
def test_trouble_is_told_and_outlived(
    run: RunDirectory, jobs: ScriptedJobs, error: Unavailable | WrongState
) -> None:
    """Neither lost nor started twice, by this server or the next one."""
    runner = runner_of(jobs)
    start(runner, run)
    eventually(lambda: jobs.submitted)
    jobs.trouble = error
    for one in (runner, runner_of(jobs)):
        comes(one, run, Running(error.message))
    jobs.trouble = None
    comes(runner, run, Running("waiting for the Ray cluster"))
    assert len(jobs.submitted) == 1


def test_an_attempt_is_submitted_when_the_cluster_is_back(
    run: RunDirectory, jobs: ScriptedJobs
) -> None:
    jobs.trouble = AWAY
    runner = runner_of(jobs)
    start(runner, run)
    comes(runner, run, Running(AWAY.message))
    assert not jobs.submitted
    jobs.trouble = None
    eventually(lambda: jobs.submitted)


def test_a_cluster_that_forgot_is_not_the_fault_of_the_job(
    run: RunDirectory, jobs: ScriptedJobs
) -> None:
    """A driver that comes late finds the claim; one that was there meets the fence of the next."""
    runner = runner_of(jobs)
    start(runner, run)
    eventually(lambda: jobs.submitted)
    jobs.jobs.clear()
    comes(runner, run, Lost(blameless=True))
    assert not claim(run.logs(1))
    start(runner, run, attempt=2)
    assert (run.path / ".attempt").read_text() == "2\n"


def test_a_server_that_died_before_it_submitted(run: RunDirectory, jobs: ScriptedJobs) -> None:
    comes(runner_of(jobs), run, Lost(blameless=True))  # not even a directory
    run.logs(1).mkdir(parents=True)
    comes(runner_of(jobs), run, Lost(blameless=True))
    assert not claim(run.logs(1))


@pytest.mark.parametrize(
    ("answer", "claimed", "outcome"),
    [
        (Present(True, -9, "killed"), True, Exited(-9)),
        (Present(True, None, "the supervisor died"), True, Lost(blameless=False)),
        (Present(True, 1, "No module named distill_server"), False, Lost(blameless=False)),
    ],
)
def test_a_driver_that_ended_without_a_word(
    run: RunDirectory, jobs: ScriptedJobs, answer: Present, claimed: bool, outcome: Outcome
) -> None:
    """Ray's message is in the log, where people look."""
    runner = runner_of(jobs)
    start(runner, run)
    eventually(lambda: jobs.submitted)
    if claimed:
        claim(run.logs(1))
    jobs.jobs[jobs.submitted[0][0]] = answer
    comes(runner, run, outcome)
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
    comes(runner, run, Lost(blameless=True))
    assert not jobs.submitted


def test_what_ended_is_asked_about_no_more(run: RunDirectory, jobs: ScriptedJobs) -> None:
    runner = runner_of(jobs)
    start(runner, run)
    write_json(run.logs(1) / "exit.json", {"code": 0})
    assert runner.poll(run, 1) == Exited(0)
    assert runner._cluster._followed == {}


def test_a_cluster_that_is_open_to_all_is_warned_of_once(
    run: RunDirectory, jobs: ScriptedJobs, caplog: pytest.LogCaptureFixture
) -> None:
    """As are its comings and goings, once each."""
    jobs.open = True
    runner = runner_of(jobs)
    start(runner, run)
    eventually(lambda: jobs.submitted)
    jobs.trouble = AWAY
    comes(runner, run, Running(AWAY.message))
    jobs.trouble = None
    comes(runner, run, Running("waiting for the Ray cluster"))
    eventually(lambda: len(caplog.messages) == 3)
    assert [message.split(":")[0] for message in caplog.messages] == [
        "whoever reaches the Ray cluster can run any program on it",
        "the Ray cluster cannot be reached",
        "the Ray cluster can be reached again",
    ]


@pytest.mark.parametrize("address", ["", "auto", "10.0.0.1:8265", "ray://head:10001", "http://"])
def test_addresses(address: str) -> None:
    with pytest.raises(InvalidInput, match="no address of a Ray dashboard") as raised:
        RayJobs(address)
    assert raised.value.field == "--ray"


def test_without_ray_there_is_a_sentence() -> None:
    """And a server that wants none imports none."""
    code = (
        "import sys, runpy, importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'ray' else find(name, *a)\n"
        "sys.argv = ['distill-server', '--ray', 'http://127.0.0.1:1']\n"
        "runpy.run_module('distill_server', run_name='__main__')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr == (
        "error: --ray: Ray is not installed; pip install 'distill-service[ray]'\n"
    )


def test_variables_of_ranks() -> None:
    """As torch's launcher has them, of two nodes with three GPUs for the job."""
    places = [
        Place("a", "10.0.0.1", ("2", "3"), 4001),
        Place("a", "10.0.0.1", ("5", "6"), 4002),
        Place("b", "10.0.0.2", ("0", "1"), 4003),
    ]
    shared = {"WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4001"}
    first = {**shared, "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "2,3,5,6"}
    assert rank_variables(places) == [
        {**first, "RANK": "0", "LOCAL_RANK": "0"},
        {**first, "RANK": "1", "LOCAL_RANK": "1"},
        {
            **shared,
            **{"RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            "CUDA_VISIBLE_DEVICES": "0,1",
        },
    ]
    # One alone is no group, and sees no GPU that it was not given.
    assert rank_variables([Place("a", "10.0.0.1", (), 4001)]) == [{"CUDA_VISIBLE_DEVICES": ""}]


class Clock:
    """Time passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_earlier_attempts_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until they say that they ended, or have been still for long."""
    clock = Clock()
    monkeypatch.setattr(living_shims, "time", clock)
    logs = tmp_path / "logs"
    shims = [logs / "attempt-1", logs / "attempt-2" / "rank-0", logs / "attempt-2" / "rank-1"]
    for shim in [*shims, logs / "attempt-10" / "rank-0", logs / "attempt-3" / "rank-0"]:
        shim.mkdir(parents=True)
        write_json(shim / "shim.json", {})
    write_json(shims[0] / "exit.json", {"code": 0})
    old = LivingShims(attempts_before(logs / "attempt-3"))
    for beat in range(100):
        for shim in shims[1:]:
            (shim / "heartbeat").touch()
            os.utime(shim / "heartbeat", ns=(beat, beat + 1))
        assert not old.are_gone()
    write_json(shims[1] / "exit.json", {"code": 0})
    since = clock.now
    while not old.are_gone():
        assert clock.now < since + 20
    assert clock.now >= since + 14
    assert LivingShims(attempts_before(logs / "attempt-1")).are_gone()


class OwnedShim:
    """A shim of one process among several, and the end of its stdin that we hold."""

    def __init__(self, run: RunDirectory, code: str, attempt: int = 1) -> None:
        self.directory = run.logs(attempt) / "rank-0"
        self.directory.mkdir(parents=True)
        log = run.log_file(attempt)
        self.ours, theirs = socket.socketpair()
        argv = [sys.executable, "-m", "distill_server.shim", str(log), "5"]
        argv += ["--rank", str(self.directory), "--", sys.executable, "-S", "-c", code]
        environment = {**os.environ, VARIABLE: raise_fence(run.path, attempt)}
        with theirs:
            subprocess.run(argv, stdin=theirs.fileno(), env=environment, check=True)
        eventually(lambda: card_of(self.directory) or self.code is not None)

    @property
    def mark(self) -> str:
        found = json.loads((self.directory / "shim.json").read_text())["mark"]
        assert isinstance(found, str)
        return found

    @property
    def code(self) -> int | None:
        return exit_code_of(self.directory)

    def ended(self) -> int | None:
        """Its stdin is closed when it has ended, and not before."""
        self.ours.settimeout(60)
        assert self.ours.recv(1) == b""
        return self.code


ORPHAN = (
    "import subprocess, time\n"
    "subprocess.Popen(['sleep', '99'], start_new_session=True)\n"
    "time.sleep(99)"
)


@pytest.fixture
def shim(run: RunDirectory) -> Iterator[Callable[..., OwnedShim]]:
    made: list[OwnedShim] = []

    def make(code: str, attempt: int = 1) -> OwnedShim:
        made.append(OwnedShim(run, code, attempt))
        return made[-1]

    yield make
    for one in made:
        one.ours.close()
        kill_family(one.mark)


def test_an_owned_shim_tells_its_owner(shim: Callable[..., OwnedShim]) -> None:
    assert shim("raise SystemExit(3)").ended() == 3


def test_an_owned_shim_ends_with_its_owner(shim: Callable[..., OwnedShim]) -> None:
    one = shim(ORPHAN)
    eventually(lambda: len(family(one.mark)) == 2)
    one.ours.close()
    eventually(lambda: one.code == -signal.SIGKILL)
    assert family(one.mark) == []


def test_a_shim_ends_when_another_attempt_begins(
    run: RunDirectory, shim: Callable[..., OwnedShim]
) -> None:
    """Wherever it is: it reads the fence, which no node can miss that sees the run directory."""
    one = shim(ORPHAN)
    eventually(lambda: len(family(one.mark)) == 2)
    raise_fence(run.path, 2)
    assert one.ended() == -signal.SIGKILL
    assert family(one.mark) == []


def test_an_owned_shim_is_stopped_as_any_other(shim: Callable[..., OwnedShim]) -> None:
    one = shim("import time; time.sleep(99)")
    card = card_of(one.directory)
    assert card is not None
    assert send_signal(card.shim, signal.SIGTERM)
    assert one.ended() == -signal.SIGTERM

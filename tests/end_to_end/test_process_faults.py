"""Faults of one of two trainer processes: it is frozen, slow, cut off, or computes no numbers."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clients.jobs.job import JobState
from clients.runs.directory import RunDirectory
from distill_server.jobs.verdict import DeadAttempt, JobEnded, verdict_of
from distill_server.runners.interface import Exited
from protos.errors import ErrorCode
from protos.rpc.ports import free_ports
from tests.end_to_end.conftest import Once
from tests.end_to_end.forked_trainer import finish, train
from tests.end_to_end.processes import metrics_of, new_run, weights
from tests.forks import fork
from tests.namespaces import Namespace, namespace

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

STEPS, FAULT_STEP = 8, 5
# In place of at least 600 s. On a busy machine, a step of the other process may take seconds.
LIMIT = timedelta(seconds=30)
# Of faults that end before the limit.
OUTAGE_SECONDS = 2
CLONE_NEWNET = 0x40000000


@pytest.fixture(scope="module")
def pair(material: Material, once: Once) -> RunDirectory:
    """A run of two processes, without interruption."""
    return RunDirectory(once("sft-pair", lambda path: finish(pair_run(path, material))))


def pair_run(path: Path, material: Material, **changes: Any) -> RunDirectory:
    from tests.student_trainer.tiny import sft_job

    settings = {"max_steps": STEPS, "train__processes": 2, "eval__every": 4, **changes}
    return new_run(path, sft_job(material, **settings))


def run_rank(
    run: Path, rank: int, address: str, port: int, network: str, fault: Callable[[], None] | None
) -> None:
    """Run one rank of attempt 1, in the network namespace `network` if it is not "".

    `fault`: called before the update of step FAULT_STEP.
    """
    if network:
        with open(f"/run/netns/{network}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0
    import torch

    from student_trainer import assembly
    from student_trainer.loop.learner import Learner

    torch.set_num_threads(1)
    local_ranks = (0, 1) if network else (rank, 2)
    variables = dict(zip(("LOCAL_RANK", "LOCAL_WORLD_SIZE"), local_ranks, strict=True))
    variables |= {"RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in variables.items()}
    os.environ["MASTER_ADDR"] = address
    assembly.time_limit = lambda *_: LIMIT
    learn = Learner.learn

    def learn_with_fault(learner: Learner, step: int, *arguments: Any) -> Any:
        if step == FAULT_STEP and fault is not None:
            fault()
        return learn(learner, step, *arguments)

    Learner.learn = learn_with_fault  # type: ignore[method-assign]
    train(run, 1, -1, "", None)


@contextmanager
def ranks(
    run: RunDirectory,
    faulty: int,
    fault: Callable[[], None],
    machine: Namespace | None = None,
) -> Iterator[list[BaseProcess]]:
    """Run attempt 1 with a fault in one rank; rank 1 is on `machine`, if any."""
    run.logs(1).mkdir(parents=True)
    (port,) = free_ports(1)
    address = "127.0.0.1" if machine is None else machine.here
    names = ("", "") if machine is None else ("", machine.name)
    processes = [
        fork(
            run_rank, run.path, rank, address, port, names[rank], fault if rank == faulty else None
        )
        for rank in range(2)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def exit_code(process: BaseProcess, run: RunDirectory) -> int:
    process.join(300)
    assert process.exitcode is not None, run.log_file(1).read_text()
    return process.exitcode


def assert_attempt_died(run: RunDirectory, code: int, reason: str) -> None:
    """The fault is not one of the job: the job gets another attempt."""
    verdict = verdict_of(JobState.RUNNING, FAULT_STEP, run.read_status(), Exited(code))
    assert isinstance(verdict, DeadAttempt), verdict
    assert not verdict.blameless
    assert reason in verdict.reason


def assert_continues(run: RunDirectory, pair: RunDirectory) -> None:
    finish(run, 2)
    assert_equal(run, pair)


def assert_equal(run: RunDirectory, pair: RunDirectory) -> None:
    from tests.student_trainer.tiny import curve

    assert curve(metrics_of(run)) == curve(metrics_of(pair))
    assert weights(run) == weights(pair)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_frozen_process_ends_the_attempt(
    rank: int, material: Material, pair: RunDirectory, tmp_path: Path
) -> None:
    run = pair_run(tmp_path / "run", material)
    assert_frozen_process_ends_attempt(run, rank)
    assert_continues(run, pair)


def assert_frozen_process_ends_attempt(run: RunDirectory, rank: int) -> None:
    with ranks(run, rank, freeze) as processes:
        code = exit_code(processes[1 - rank], run)
        assert processes[rank].exitcode is None
    assert_attempt_died(run, code, "another process of the trainer has not answered")


@pytest.fixture(scope="module")
def sharded_pair(material: Material, once: Once) -> RunDirectory:
    """A run of two processes that share the weights, without interruption."""
    return RunDirectory(
        once("sft-fsdp2", lambda path: finish(pair_run(path, material, train__sharding="fsdp2")))
    )


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["frozen", "killed"])
def test_a_process_with_shards_is_lost(
    fault: str, material: Material, sharded_pair: RunDirectory, tmp_path: Path
) -> None:
    """With FSDP2, the other process waits in the gathering of weights, not of gradients."""
    run = pair_run(tmp_path / "run", material, train__sharding="fsdp2")
    if fault == "frozen":
        assert_frozen_process_ends_attempt(run, 1)
    else:
        with ranks(run, 1, kill) as processes:
            code = exit_code(processes[0], run)
        assert_attempt_died(run, code, "another process of the trainer")
    assert_continues(run, sharded_pair)


class Cut:
    """Waits in a rank until the test has cut its link."""

    def __init__(self, path: Path) -> None:
        self.reached, self.done = path / "reached", path / "done"

    def __call__(self) -> None:
        self.reached.touch()
        wait_until(self.done.exists)


@contextmanager
def cut_off_ranks(run: RunDirectory, path: Path) -> Iterator[tuple[Namespace, list[BaseProcess]]]:
    """Run attempt 1 on two machines, and set the link between them down in step FAULT_STEP."""
    cut = Cut(path)
    with namespace() as machine, ranks(run, 1, cut, machine) as processes:
        wait_until(cut.reached.exists)
        machine.set_link("down")
        cut.done.touch()
        yield machine, processes


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_process_frozen_for_less_than_the_limit(
    material: Material, pair: RunDirectory, tmp_path: Path
) -> None:
    """The other process waits, and the job continues."""
    run = pair_run(tmp_path / "run", material)
    with ranks(run, 1, freeze) as processes:
        stat = Path(f"/proc/{processes[1].pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        time.sleep(OUTAGE_SECONDS)
        assert processes[0].exitcode is None
        os.kill(processes[1].pid or 0, signal.SIGCONT)
        assert [exit_code(process, run) for process in processes] == [0, 0]
    assert_equal(run, pair)


@pytest.mark.slow
def test_a_network_lost_for_less_than_the_limit(
    material: Material, pair: RunDirectory, tmp_path: Path
) -> None:
    """TCP sends the lost packets again, and the job continues."""
    run = pair_run(tmp_path / "run", material)
    with cut_off_ranks(run, tmp_path) as (machine, processes):
        time.sleep(OUTAGE_SECONDS)
        assert [process.exitcode for process in processes] == [None, None]
        machine.set_link("up")
        assert [exit_code(process, run) for process in processes] == [0, 0]
    assert_equal(run, pair)


@pytest.mark.slow
def test_a_lost_network_ends_the_attempt(
    material: Material, pair: RunDirectory, tmp_path: Path
) -> None:
    """Packets are lost without an error, so both processes wait for their time limit."""
    run = pair_run(tmp_path / "run", material)
    with cut_off_ranks(run, tmp_path) as (_, processes):
        codes = [exit_code(process, run) for process in processes]
    assert codes[0] == codes[1]
    assert_attempt_died(run, codes[0], "another process of the trainer has not answered")
    assert_continues(run, pair)


def test_a_slow_process_changes_nothing(
    material: Material, pair: RunDirectory, tmp_path: Path
) -> None:
    """One process needs half a second more for each step, ten times that of an idle machine."""
    from tests.end_to_end.forked_trainer import trainer

    run = pair_run(tmp_path / "run", material)
    with trainer(run, dying=1, failpoint="gradients-ready:sleep:0.5") as process:
        assert process.wait() == 0, process.log
    assert_equal(run, pair)


def spoil() -> None:
    from student_trainer.objectives import cross_entropy

    cross_entropy._cross_entropy = lambda rows, index: rows.token_logprobs * math.nan


@pytest.mark.parametrize(
    ("rank", "sharding"),
    [
        (1, "none"),
        pytest.param(0, "none", marks=pytest.mark.slow),
        pytest.param(1, "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_losses_of_one_process_that_are_no_numbers(
    rank: int, sharding: str, material: Material, tmp_path: Path
) -> None:
    run = pair_run(
        tmp_path / "run", material, train__max_skipped_updates=1, train__sharding=sharding
    )
    with ranks(run, rank, spoil) as processes:
        codes = [exit_code(process, run) for process in processes]
    status = run.read_status()
    assert status is not None
    assert codes[0] == codes[1] != 0
    assert status.code == ErrorCode.DATA_LOSS.value
    assert f"step {FAULT_STEP + 1}: the gradient is not finite" in status.reason
    assert f"the loss is not finite on rank {rank};" in status.reason
    errors = [
        line for line in run.log_file(1).read_text().splitlines() if line.startswith("error: ")
    ]
    assert len(errors) == 2
    assert errors[0] == errors[1]
    assert isinstance(verdict_of(JobState.RUNNING, FAULT_STEP, status, Exited(codes[0])), JobEnded)

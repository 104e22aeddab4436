"""Rollout services started by the trainer: readiness, restarts, failure, and resources."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from clients.config.on_policy import OnPolicyJob
from clients.config.tables.common import StudentConfig
from clients.runs.launch import rollouts_command
from protos.errors import DistillError, InvalidInput, Unavailable
from student_trainer.rollout_client import local_services
from student_trainer.rollout_client.local_services import (
    RolloutServices,
    count_engines,
    rollout_services,
    share_threads,
)

READY = "print('rollout service listening on 127.0.0.1:1', flush=True)"


def job(**rollouts: object) -> OnPolicyJob:
    return OnPolicyJob.model_validate(
        {"student": {"model": "s"}, "data": {"path": "d.jsonl"}, "rollouts": rollouts}
    )


def services_of(*programs: str) -> RolloutServices:
    services = RolloutServices([f"127.0.0.1:{number}" for number in range(len(programs))], "t")
    services.start([([sys.executable, "-c", program], {}) for program in programs])
    return services


def process_of(services: RolloutServices) -> psutil.Process:
    [service] = services._services
    assert service._process is not None
    return psutil.Process(service._process.pid)


@pytest.fixture
def loss_recorder() -> Iterator[Any]:
    """A callback that records the error of a failed service."""
    errors: list[DistillError] = []
    is_recorded = threading.Event()

    def call(error: DistillError) -> None:
        errors.append(error)
        is_recorded.set()

    call.wait = lambda: is_recorded.wait(60) and errors[0]  # type: ignore[attr-defined]
    return call


@pytest.mark.parametrize(
    ("lora", "rank"),
    [
        (None, 0),
        ({"rank": 8}, 8),
        ({"rank": 8, "train_head": True}, 0),  # the adapters do not have the head
        ({"rank": 1024}, 0),
    ],
)
def test_an_engine_is_told_the_rank_of_the_adapters(lora: Any, rank: int) -> None:
    config = job(engine="vllm")
    student = StudentConfig(model="s", lora=lora)
    config = config.model_copy(update={"student": student})
    assert config.student.adapter_rank == rank
    command = rollouts_command(config.student, config.rollouts)
    assert ("--lora-rank" in command) == (rank > 0)
    if rank:
        assert command[command.index("--lora-rank") + 1] == str(rank)


def test_ready_and_stopped() -> None:
    services = services_of(f"import time; {READY}; time.sleep(99)")
    assert services.addresses() == ["127.0.0.1:0"]
    child = process_of(services)
    services.stop()
    assert not child.is_running()


def test_deaf_services_are_killed_after_one_period_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_services, "_STOP_SECONDS", 2.0)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    services = services_of(*[f"{deaf} {READY}; time.sleep(99)"] * 10)
    services.addresses()
    children = [psutil.Process(service._process.pid) for service in services._services]  # type: ignore[union-attr]
    began = time.monotonic()
    services.stop()
    assert time.monotonic() - began < 18  # sequentially it would take 20 s
    assert not any(child.is_running() for child in children)


def test_one_that_does_not_start_is_told_with_its_message() -> None:
    services = services_of("import sys; sys.exit('error: --model: there is no such directory')")
    with pytest.raises(InvalidInput, match="no such directory") as caught:
        services.addresses()
    assert caught.value.field == "rollouts.engine"
    services.stop()


def test_one_that_is_killed_is_started_again(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    program = f"import time; open({str(starts)!r}, 'a').write('x'); {READY}; time.sleep(99)"
    services = services_of(program)
    services.addresses()
    child = process_of(services)
    os.kill(child.pid, signal.SIGKILL)
    child.wait(20)
    while starts.read_text() != "xx":
        pass
    services.stop()


def test_one_that_always_dies_is_given_up(loss_recorder: Any) -> None:
    services = services_of(f"import sys; {READY}; sys.exit('error: out of memory')")
    services.call_when_lost(loss_recorder)
    services.addresses()
    error = loss_recorder.wait()
    assert isinstance(error, Unavailable)
    assert "has ended 4 times" in error.message
    assert "out of memory" in error.message
    services.call_when_lost(loss_recorder)  # a later callback is called, too
    services.stop()


@pytest.mark.slow
def test_one_of_two_that_is_given_up_ends_nothing(loss_recorder: Any) -> None:
    dying_program = f"import sys; {READY}; sys.exit('error: out of memory')"
    services = services_of(dying_program, f"import time; {READY}; time.sleep(99)")
    services.call_when_lost(loss_recorder)
    services.addresses()
    services._services[0]._thread.join(60)
    assert services._ended_count == 1
    assert services._lost is None
    services.stop()


def test_other_ranks_start_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with rollout_services(job(lag=1)) as services:
        assert services is not None
        assert services.addresses() == []
    with rollout_services(job()) as services:
        assert services is None
    with rollout_services(job(address=["a:1", "b:2"])) as services:
        assert services is not None
        assert services.addresses() == ["a:1", "b:2"]


@pytest.mark.parametrize(
    ("own", "processes", "lag", "expected"),
    [(8, 1, 1, (4, 4)), (1, 1, 1, (1, 1)), (4, 2, 1, (2, 4)), (3, 1, 2, (1, 2)), (8, 1, 0, (8, 8))],
)
def test_threads_are_shared(
    own: int, processes: int, lag: int, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare (threads of a trainer process, threads of all engines)."""
    monkeypatch.setenv("OMP_NUM_THREADS", str(own))
    config = job(lag=lag, engine="vllm")
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"processes": processes})}
    )
    of_engines = share_threads(config, config.rollouts)
    assert (int(os.environ["OMP_NUM_THREADS"]), of_engines) == expected


def test_engines_get_the_gpus_after_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = job(engine="vllm", gpus=4, tensor_parallel_size=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,2,5,3,1")
    variables = [
        local_services._gpu_variable(config, config.rollouts, number) for number in range(2)
    ]
    assert [variable["CUDA_VISIBLE_DEVICES"] for variable in variables] == ["2,5", "3,1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,2,5,3")
    with pytest.raises(
        InvalidInput,
        match=r"4 GPUs, but train.processes needs 1 .* the engine 4"
        " more",
    ):
        local_services._gpu_variable(config, config.rollouts, 0)


def test_engines_without_gpus_of_their_own_share_the_trainers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One engine on the GPU of each process; without lag, engine and trainer alternate."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,2,5")
    config = job(engine="vllm")
    config = config.model_copy(update={"train": config.train.model_copy(update={"processes": 2})})
    assert count_engines(config, config.rollouts) == 2
    variables = [
        local_services._gpu_variable(config, config.rollouts, number) for number in range(2)
    ]
    assert [variable["CUDA_VISIBLE_DEVICES"] for variable in variables] == ["7", "2"]
    assert local_services._sleep_option(config.rollouts) == ["--sleep"]
    for unshared in (job(engine="vllm", lag=1), job(engine="vllm", gpus=2), job(lag=1)):
        assert local_services._sleep_option(unshared.rollouts) == []
    own_gpus = job(engine="vllm", gpus=2, tensor_parallel_size=2)
    assert count_engines(own_gpus, own_gpus.rollouts) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_engines(config, config.rollouts) == 1
    assert local_services._gpu_variable(config, config.rollouts, 0) == {}
    assert local_services._sleep_option(config.rollouts) == []
    assert count_engines(job(), job().rollouts) == 0

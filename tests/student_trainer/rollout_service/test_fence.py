"""Trainers that are replaced by a later attempt, or no longer respond."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from clients.runs.identity import run_identity
from protos.errors import WrongState
from student_trainer.rollout_client.engine_client import EngineClient
from student_trainer.rollout_client.order import Order
from student_trainer.rollout_service.service import Fence, RolloutServicer
from tests.forks import fork
from tests.student_trainer.rollout_service import scripted_service
from tests.student_trainer.rollout_service.conftest import StartService
from tests.student_trainer.rollout_service.material import order, snapshot
from tests.student_trainer.rollout_service.scripted_service import ScriptedEngine, serve_on_thread
from tests.student_trainer.rollout_service.test_service import LONG, sample_forever, wait_until


def of_attempt(order_of_job: Order, attempt: int, job: str = "job") -> Order:
    lineage = f"{job}-{attempt}"
    weights = replace(order_of_job.weights, job=job, attempt=attempt, lineage=lineage)
    return replace(order_of_job, weights=weights)


def test_a_later_attempt_ends_the_earlier_one(start_service: StartService, tmp_path: Path) -> None:
    """As after a network split: one order runs, one waits, one comes later."""
    address = start_service().address
    directory, second_snapshot = snapshot(tmp_path, 1), snapshot(tmp_path, 2)
    with EngineClient([address]) as zombie, EngineClient([address]) as trainer:
        running_order = zombie.sample(of_attempt(order(directory, **LONG), 1))
        next(running_order)
        waiting_order = zombie.sample(of_attempt(order(second_snapshot, number=2), 1))
        other_job = trainer.sample(of_attempt(order(directory), 1, "another job"))
        sequences = dict(trainer.sample(of_attempt(order(second_snapshot, number=2), 2)))
        assert len(sequences) == 8
        message = "attempt 2 of this job has replaced the attempt that sent this order"
        for sampling in (running_order, waiting_order):
            with pytest.raises(WrongState, match=message):
                list(sampling)
        with pytest.raises(WrongState, match=message):
            zombie.sample(of_attempt(order(directory), 1))
        assert len(dict(other_job)) == 8
        assert len(dict(trainer.sample(of_attempt(order(directory), 2)))) == 8


def test_the_fence_forgets_what_it_has_not_heard_for_long() -> None:
    def weights(job: str, attempt: int) -> Order:
        return of_attempt(order(Path("/x")), attempt, job)

    fence = Fence(max_jobs=2)
    for job, attempt in [("a", 5), ("b", 5), ("a", 5), ("c", 5)]:
        fence.admit(weights(job, attempt).weights)
    # "b" was forgotten, so that attempt 1 is admitted as its first.
    assert isinstance(fence.admit(weights("b", 1).weights), WrongState)
    with pytest.raises(WrongState, match="attempt 5"):
        fence.admit(weights("c", 4).weights)
    assert fence.admit(order(Path("/x")).weights) is None  # of no job


def test_orders_of_a_frozen_trainer_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection stays open, as that of a machine without power. The limit here is 2 s."""
    quick = {"grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 1000}
    quick["grpc.http2.ping_timeout_ms"] = 1000
    options = [(key, quick.get(key, value)) for key, value in scripted_service.SERVER_OPTIONS]
    monkeypatch.setattr(scripted_service, "SERVER_OPTIONS", options)
    engine = ScriptedEngine()
    engine.go.clear()
    with serve_on_thread(RolloutServicer(engine)) as address:
        trainer = fork(sample_forever, address, tmp_path, 1)
        try:
            wait_until(lambda: engine.open == 1)
            assert trainer.pid is not None
            os.kill(trainer.pid, signal.SIGSTOP)
            wait_until(lambda: engine.open == 0)
        finally:
            trainer.kill()
            trainer.join()


def test_a_run_directory_has_one_identity(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    identity = run_identity(run)
    assert run_identity(run) == identity
    assert identity.startswith("run-")
    run_copy = tmp_path / "copied" / "run"
    run_copy.mkdir(parents=True)
    (run_copy / ".identity").write_bytes((run / ".identity").read_bytes())
    (run / ".identity").unlink()
    assert len({identity, run_identity(run_copy), run_identity(run)}) == 3

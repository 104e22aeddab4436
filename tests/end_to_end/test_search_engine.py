"""A search job sampled by an engine: equal bits without lag, and with lag after a kill."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.end_to_end.forked_trainer import finish, kill_after_checkpoint, trainer
from tests.end_to_end.processes import metrics_of, new_run, weights
from tests.end_to_end.test_rollouts_ahead import assert_same, curve_of, without_lag

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material


@pytest.mark.slow
def test_without_lag_an_engine_changes_no_bit(material: Material, tmp_path: Path) -> None:
    from tests.student_trainer.rollout_service.processes import ServiceProcess
    from tests.student_trainer.searching import searching_job

    config = searching_job(material, tmp_path, max_steps=3)
    local_run = finish(new_run(tmp_path / "here", config))
    service = ServiceProcess("--model", config.student.model, log=tmp_path / "service.log")
    rollouts = {"rollouts__address": service.address}
    engine_config = searching_job(material, tmp_path, max_steps=3, **rollouts)
    try:
        engine_run = finish(new_run(tmp_path / "there", engine_config))
    finally:
        service.close()
    lines = metrics_of(engine_run)[1:]
    assert all(line["search/queries"] > 0 for line in lines), "nobody asked"
    assert {line["rollout/lag"] for line in lines} == {0.0}
    assert without_lag(curve_of(engine_run)) == curve_of(local_run)
    assert weights(engine_run) == weights(local_run)


@pytest.mark.slow
def test_killed_trainers_resume_to_the_same_bits(material: Material, tmp_path: Path) -> None:
    """Two trainers are killed; the checkpoint has the conversations of two later steps."""
    from tests.student_trainer.searching import searching_job

    changes: dict[str, Any] = {"max_steps": 5, "rollouts__lag": 2}
    config = searching_job(material, tmp_path, **changes)
    expected_run = finish(new_run(tmp_path / "expected", config))
    assert [line["rollout/lag"] for line in metrics_of(expected_run)[1:]] == [0, 1, 2, 2, 2]
    run = new_run(tmp_path / "run", config)
    kill_after_checkpoint(run, 2)
    with trainer(run, 2, failpoint="snapshot-weights-written:kill:2") as process:
        assert process.wait() == -signal.SIGKILL, process.log
    finish(run, 3)
    assert_same(run, expected_run)
    assert all(line["search/queries"] > 0 for line in metrics_of(run)[1:])

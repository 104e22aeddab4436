"""The warning that all rewards are equal: when it is logged, and for which jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from student_trainer.loop.watches import RewardWatch
from tests.end_to_end.processes import metrics_of
from tests.student_trainer import tiny
from tests.student_trainer.methods.test_rl import trainer_of

FLAT, UNEQUAL = {"reward/flat_groups": 1.0}, {"reward/flat_groups": 0.75}


def test_it_warns_once_after_five_steps(caplog: pytest.LogCaptureFixture) -> None:
    watch = RewardWatch()
    for step, metrics in enumerate([FLAT] * 4 + [UNEQUAL] + [FLAT] * 4, 1):
        watch.see(step, metrics)
        assert not watch.note
    assert not caplog.records
    for step in range(10, 30):
        watch.see(step, FLAT)
        assert watch.note == "all rewards equal since step 6"
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["step 10"]
    watch.see(30, UNEQUAL)
    assert not watch.note


@pytest.mark.parametrize(
    ("changes", "learns"),
    [
        ({}, True),
        ({"method__advantages": "gae"}, False),
        ({"method__reward_weight": 0.0, "anchor__context": "x"}, False),
        ({"reward": None, "anchor__context": "x"}, False),
    ],
)
def test_only_groups_are_watched(
    material: tiny.Material, changes: dict[str, Any], learns: bool
) -> None:
    assert tiny.rl_job(material, **changes).learns_from_groups == learns


def test_a_job_whose_rewards_are_all_equal(
    material: tiny.Material, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No answer matches: the log and the status say so, and the gradient is zero."""
    changes = {"reward__pattern": "never", "method__beta": 0.0, "max_steps": 6, "eval__every": 9}
    with trainer_of(tmp_path / "run", tiny.rl_job(material, **changes)) as trainer:
        phases: list[str] = []
        say = trainer.progress.say
        trainer.progress.say = lambda phase, step: (phases.append(phase), say(phase, step))[1]  # type: ignore[method-assign, func-returns-value]
        assert trainer.train() == "succeeded"
    lines = metrics_of(trainer.run)[1:]
    assert all(line["reward/flat_groups"] == 1 and line["grad_norm"] == 0 for line in lines)
    assert sum("policy gradient is zero" in record.getMessage() for record in caplog.records) == 1
    assert "training (all rewards equal since step 1)" in phases

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clients.runs.directory import RunDirectory
from clients.runs.metrics_file import Point, read_points
from clients.runs.progress import Progress
from student_trainer.assembly import assemble
from student_trainer.loop.watches import HeadWatch
from student_trainer.rewards import make_rewards
from tests.student_trainer import tiny


def test_a_head_that_empties_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = HeadWatch([])
    for step, mass in enumerate((0.8, 0.9, 0.41, 0.39, 0.1), 1):
        watch.see(step, {"topk/student_mass": mass})
        watch.see(step, {"loss": 1.0})
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["step 4"]
    assert "0.39" in caplog.text
    assert "0.80" in caplog.text


def test_a_small_head_that_stays_is_not(caplog: pytest.LogCaptureFixture) -> None:
    watch = HeadWatch([])
    for step in range(5):
        watch.see(step, {"topk/student_mass": 0.1})
    assert not caplog.records


def test_a_resumed_run_is_held_to_its_first_step(caplog: pytest.LogCaptureFixture) -> None:
    """The reference is step 1 of the run, not of the attempt, whose head mass is already halved."""
    history = [Point(0, {"eval/kl": 1.0})]
    history += [Point(step, {"topk/student_mass": 0.8 / step}) for step in (1, 2)]
    watch = HeadWatch(history)
    watch.see(3, {"topk/student_mass": 0.41})
    assert not caplog.records
    watch.see(4, {"topk/student_mass": 0.39})
    assert "0.80" in caplog.text


@pytest.mark.parametrize(
    ("changes", "watched"),
    [
        ({}, True),
        ({"method__beta": 0.0}, False),
        ({"method__beta": 0.0, "teacher": {"address": "localhost:1"}}, True),
        ({"method__kl_in": "reward"}, False),
        ({"method__top_k": 0}, False),
    ],
)
def test_only_a_head_that_is_learned_from_is_watched(
    material: tiny.Material, changes: dict[str, Any], watched: bool
) -> None:
    assert tiny.rl_job(material, **changes).learns_from_head == watched
    assert tiny.job(material).learns_from_head


def test_the_trainer_knows_what_its_run_began_with(material: tiny.Material, tmp_path: Path) -> None:
    config = tiny.rl_job(material, max_steps=2, checkpoint__every=1)
    run = RunDirectory.create(tmp_path / "run", config)
    assert config.reward is not None
    for attempt, from_step in ((1, None), (2, 1)):
        progress = Progress(run, attempt=attempt, max_steps=2, main=True, terminated=lambda: False)
        with make_rewards(config.reward) as rewards:
            trainer = assemble(config, run, {}, progress, attempt, from_step, rewards)
            points_before = list(read_points(run.metrics))
            assert trainer.train() == "succeeded"
    assert [point.step for point in points_before] == [0, 1]
    (watch,) = (head_watch for head_watch in trainer.watches if isinstance(head_watch, HeadWatch))
    assert watch._reference_mass == points_before[1].metrics["topk/student_mass"]

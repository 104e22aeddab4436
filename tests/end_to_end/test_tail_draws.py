"""Jobs whose tail term comes from ids that the student drew: the same tokens, and the same bits
after a kill, for a teacher service and for an anchor.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clients.runs.directory import RunDirectory
from tests.end_to_end.forked_trainer import attempt, finish
from tests.end_to_end.processes import metrics_of, new_run, weights

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material


def job_of(kind: str, material: Material, teacher: str, **changes: Any) -> Any:
    from tests.student_trainer.tiny import job, rl_job

    if kind == "on-policy":
        return job(material, teacher, **{"max_steps": 8, **changes})
    return rl_job(material, **{"max_steps": 8, "teacher__address": teacher, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["on-policy", "rl"])
def test_the_same_tokens_and_the_same_bits_after_a_kill(
    kind: str, material: Material, teacher: str, tmp_path: Path
) -> None:
    from tests.student_trainer.tiny import curve

    # One update a step: a second one is made of other weights.
    changes = {} if kind == "on-policy" else {"method__updates_per_step": 1}
    draws = {**changes, "method__tail": "bucket+draws", "checkpoint__every": 3}
    drawn = finish(new_run(tmp_path / "drawn", job_of(kind, material, teacher, **draws)))
    plain = finish(new_run(tmp_path / "plain", job_of(kind, material, teacher, **changes)))
    one, other = (metrics_of(run)[1] for run in (drawn, plain))
    same = ("entropy", "topk/student_mass", "topk/teacher_mass", "tokens")
    for name in same:
        assert one.get(name) == other.get(name), name
    assert one["kl/teacher"] == pytest.approx(other["kl/teacher"], rel=0.5)
    assert one["kl/teacher"] != other["kl/teacher"]
    run: RunDirectory = new_run(tmp_path / "run", job_of(kind, material, teacher, **draws))
    assert attempt(run, 1, 0, "step-done:kill:5")[0] == -signal.SIGKILL
    finish(run, 2)
    assert curve(metrics_of(run)) == curve(metrics_of(drawn))
    assert weights(run) == weights(drawn)


@pytest.mark.slow
def test_two_processes_draw_what_one_draws(
    material: Material, teacher: str, tmp_path: Path
) -> None:
    from tests.end_to_end.test_two_processes import assert_close

    changes = {"method__tail": "bucket+draws", "max_steps": 6}
    one, two = (
        finish(
            new_run(
                tmp_path / f"{processes}",
                job_of("rl", material, teacher, train__processes=processes, **changes),
            )
        )
        for processes in (1, 2)
    )
    assert_close(metrics_of(one), metrics_of(two))

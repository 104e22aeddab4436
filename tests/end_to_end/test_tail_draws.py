"""Jobs whose tail term uses ids that the student drew: the same tokens, and the same bits after a
kill, for a teacher service and for an anchor.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clients.runs.directory import RunDirectory
from tests.end_to_end.forked_trainer import finish, run_attempt
from tests.end_to_end.processes import metrics_of, new_run, weights

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material


def make_job(kind: str, material: Material, teacher: str, **changes: Any) -> Any:
    from tests.student_trainer.tiny import job, rl_job

    if kind == "on-policy":
        return job(material, teacher, **{"max_steps": 8, **changes})
    return rl_job(material, **{"max_steps": 8, "teacher__address": teacher, **changes})


@pytest.mark.parametrize("kind", ["on-policy", pytest.param("rl", marks=pytest.mark.slow)])
def test_the_same_tokens_and_the_same_bits_after_a_kill(
    kind: str, material: Material, teacher: str, tmp_path: Path
) -> None:
    from tests.student_trainer.tiny import curve

    # One update per step: a second one would use other weights.
    changes = {} if kind == "on-policy" else {"method__updates_per_step": 1}
    draws_options = {**changes, "checkpoint__every": 3}
    coin_options = {**changes, "method__tail": "bucket+sampled"}
    draws_run = finish(
        new_run(tmp_path / "drawn", make_job(kind, material, teacher, **draws_options))
    )
    coin_run = finish(
        new_run(tmp_path / "plain", make_job(kind, material, teacher, **coin_options))
    )
    draws_line, coin_line = (metrics_of(run)[1] for run in (draws_run, coin_run))
    equal_metrics = ("entropy", "topk/student_mass", "topk/teacher_mass", "tokens")
    for name in equal_metrics:
        assert draws_line.get(name) == coin_line.get(name), name
    assert draws_line["kl/teacher"] == pytest.approx(coin_line["kl/teacher"], rel=0.5)
    assert draws_line["kl/teacher"] != coin_line["kl/teacher"]
    noise_metric = "topk/gradient_sd" if kind == "on-policy" else "topk/teacher_gradient_sd"
    assert 0 < draws_line[noise_metric] < 10
    assert noise_metric not in coin_line
    run: RunDirectory = new_run(
        tmp_path / "run", make_job(kind, material, teacher, **draws_options)
    )
    assert run_attempt(run, 1, 0, "step-done:kill:5")[0] == -signal.SIGKILL
    finish(run, 2)
    assert curve(metrics_of(run)) == curve(metrics_of(draws_run))
    assert weights(run) == weights(draws_run)


def test_forward_kl_reads_what_the_teacher_drew(
    material: Material, teacher: str, tmp_path: Path
) -> None:
    """The tokens are the same with and without the teacher's tail samples; the estimate differs."""
    changes = {"method__divergence": "forward_kl", "max_steps": 2}
    metrics_by_tail = [
        metrics_of(
            finish(new_run(tmp_path / tail, make_job("on-policy", material, teacher, **options)))
        )
        for tail, options in (
            ("default", changes),
            ("named", {**changes, "method__tail": "bucket+teacher_samples"}),
            ("coin", {**changes, "method__tail": "bucket+sampled"}),
        )
    ]
    default, explicit, coin = (metrics[1] for metrics in metrics_by_tail)
    assert default["kl/teacher"] == explicit["kl/teacher"]
    assert default["entropy"] == coin["entropy"]
    assert default["kl/teacher"] == pytest.approx(coin["kl/teacher"], rel=0.5)
    assert default["kl/teacher"] != coin["kl/teacher"]
    assert "topk/gradient_sd" not in default


def test_a_kl_that_is_only_measured_is_measured_by_draws(
    material: Material, teacher: str, tmp_path: Path
) -> None:
    weights_of_kls = {"method__teacher_beta": 0.0, "method__beta": 0.0, "max_steps": 2}
    run = finish(new_run(tmp_path / "run", make_job("rl", material, teacher, **weights_of_kls)))
    assert metrics_of(run)[1]["kl/teacher"] > 0
    assert metrics_of(run)[1]["topk/teacher_gradient_sd"] > 0


@pytest.mark.slow
def test_two_processes_draw_what_one_draws(
    material: Material, teacher: str, tmp_path: Path
) -> None:
    from tests.end_to_end.test_two_processes import assert_close

    changes = {"max_steps": 6}
    single_run, double_run = (
        finish(
            new_run(
                tmp_path / f"{processes}",
                make_job("rl", material, teacher, train__processes=processes, **changes),
            )
        )
        for processes in (1, 2)
    )
    assert_close(metrics_of(single_run), metrics_of(double_run))

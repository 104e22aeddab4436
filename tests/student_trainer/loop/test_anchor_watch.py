"""Predictions for the gap between student and anchor, compared with a simulation."""

from __future__ import annotations

import itertools
import logging
import math
from pathlib import Path

import pytest

from clients.config.rl import RLJob
from student_trainer.loop.watches import StabilityWatch, contraction
from student_trainer.teachers.anchor import Anchor
from tests.student_trainer import tiny
from tests.student_trainer.teachers.anchors import move, spread_student

TAUS, PERIODS = [0.0, 0.5, 0.9, 1.0], [1, 2, 10]
# alpha beta lambda: no pull, weak, half a step, oscillating, and diverging.
PULLS = [0.0, 0.01, 0.5, 1.9, 2.0, 2.02, 2.5]


def simulate_gap(tau: float, period: int, pull: float, periods: int) -> float:
    """Return the gap before an update of the anchor, with a quadratic loss between the two."""
    theta, phi = 1.0, 0.0
    gap_before = 0.0
    for _ in range(periods):
        for _ in range(period):
            theta = theta - pull * (theta - phi)
        gap_before = theta - phi
        phi = tau * phi + (1 - tau) * theta
    return gap_before


@pytest.mark.parametrize(("tau", "period", "pull"), list(itertools.product(TAUS, PERIODS, PULLS)))
def test_a_gap_is_left_by_the_contraction(tau: float, period: int, pull: float) -> None:
    options = {"tau": tau, "update_period": period, "learning_rate": 0.1, "beta": 0.2}
    curvature = pull / 0.02
    factor = contraction(**options, curvature=curvature)  # type: ignore[arg-type]
    gap_after_one, gap_after_two = (abs(simulate_gap(tau, period, pull, count)) for count in (1, 2))
    assert gap_after_two == pytest.approx(factor * gap_after_one, rel=1e-9, abs=1e-15)


@pytest.fixture
def job() -> RLJob:
    return tiny.rl_job(tiny.Material.at(Path("material")), method__beta=0.5)


def metrics(anchor: Anchor, *, kl: float) -> dict[str, float]:
    """Return metrics of a step whose gradient has the norm of its update, so that the rate is 1."""
    rate, reach = 1e-3, math.sqrt(anchor.elements)
    gap = anchor.gap()
    anchor_metrics = {"anchor/gap": gap, "anchor/version": float(anchor.version), "kl/anchor": kl}
    return {"lr": rate, "grad_norm": rate * reach, **anchor_metrics}


def test_the_watch_warns_once(job: RLJob, caplog: pytest.LogCaptureFixture) -> None:
    """beta lambda = KL / |d|^2; its bound follows from tau = 0.8 and P = 2."""
    student = spread_student(tiny.model(seed=2))
    anchor = Anchor(student, tau=0.8, update_period=2)
    move(student, anchor, 1)
    squares = sum(
        float((copy - learned.detach()).double().square().sum())
        for copy, learned in zip(
            anchor.state().values(), student.trained.model.parameters(), strict=True
        )
    )
    watch = StabilityWatch(job, anchor)
    max_kl = (1 + 0.8**-0.5) * squares
    with caplog.at_level(logging.WARNING):
        watch.see(1, metrics(anchor, kl=0.99 * max_kl))
        watch.see(2, metrics(anchor, kl=-1.0))
        watch.see(3, metrics(anchor, kl=max_kl) | {"anchor/gap": 0.0})
        # A step that updates the anchor: the gap is 0.8 of the one that the KL was measured at.
        anchor_metrics = {"anchor/gap": 0.8 * anchor.gap(), "anchor/version": anchor.version + 1.0}
        watch.see(3, metrics(anchor, kl=0.99 * max_kl) | anchor_metrics)
        watch.see(3, metrics(anchor, kl=0.0) | {"anchor/version": anchor.version + 1.0})
        assert not caplog.records
        watch = StabilityWatch(job, anchor)
        watch.see(4, metrics(anchor, kl=1.01 * max_kl))
        watch.see(5, metrics(anchor, kl=9.0 * max_kl))
    (record,) = caplog.records
    assert "step 4: the KL to the anchor may be unstable" in record.getMessage()

"""Two processes of `accelerate launch` over gloo equal one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clients.jobs.job import JobState
from clients.runs.directory import Control, RunDirectory
from distill_server.jobs.verdict import DeadAttempt, verdict_of
from distill_server.runners.interface import Exited
from tests.end_to_end.conftest import Once
from tests.end_to_end.forked_trainer import Forked, finish, trainer
from tests.end_to_end.processes import metrics_of, new_run, weights

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

STEPS = 12
COUNTS = {"tokens", "length/mean", "length/truncated", "step", "lr"}


PAIR = {"max_steps": STEPS, "train__processes": 2, "eval__every": 4}


@pytest.fixture(scope="module")
def pair(material: Material, teacher: str, once: Once) -> RunDirectory:
    """A run of two launched processes, without interruption."""
    from tests.student_trainer.tiny import job

    run = RunDirectory(
        once(
            "pair",
            lambda path: finish(new_run(path, job(material, teacher, **PAIR)), launched=True),
        )
    )
    assert run.log_file(1).read_text().count("INFO student_trainer.assembly") == 2
    return run


def test_the_same_curve_as_one_process(
    material: Material, teacher: str, pair: RunDirectory, tmp_path: Path
) -> None:
    from tests.student_trainer.tiny import job

    config = job(material, teacher, max_steps=STEPS, eval__every=4)
    assert_close(metrics_of(pair), metrics_of(finish(new_run(tmp_path / "run", config))))


def assert_close(
    lines: Sequence[Mapping[str, Any]], expected_lines: Sequence[Mapping[str, Any]]
) -> None:
    """Compare two curves: equal up to the order of sums; whole numbers are equal."""
    from tests.student_trainer.tiny import curve

    largest_difference = 0.0
    for line, expected_line in zip(curve(lines), curve(expected_lines), strict=True):
        assert line.keys() == expected_line.keys()
        for name, value in expected_line.items():
            if name in COUNTS or name == "eval/accuracy":
                assert line[name] == pytest.approx(value, rel=1e-12), (name, line["step"])
            else:
                # The bound holds for the logarithm of a perplexity.
                actual, reference = (
                    math.log(number) if name == "eval/perplexity" else number
                    for number in (line[name], value)
                )
                largest_difference = max(largest_difference, abs(actual - reference))
                assert math.isclose(actual, reference, abs_tol=1e-5), (name, line["step"])
    print(f"largest difference between the runs: {largest_difference:.1e}")


@pytest.mark.slow
def test_two_processes_stopped_killed_and_resumed(
    material: Material, teacher: str, pair: RunDirectory, tmp_path: Path
) -> None:
    """Stopped at a checkpoint, then killed, two processes come to the bits of `pair`."""
    from tests.student_trainer.tiny import curve, job

    run = new_run(tmp_path / "run", job(material, teacher, **PAIR))
    with trainer(run, 1) as process:
        process.wait_for_step(3)
        run.write_control(Control("checkpoint"))
        assert process.wait() == 0, process.log
    status = run.read_status()
    assert status is not None
    assert status.verdict == "cancelled"
    assert (run.checkpoints / f"step-{status.step:06d}").is_dir()
    run.write_control(Control())
    with trainer(run, 2, launched=True) as process:
        process.wait_for_step(status.step + 1)
        process.kill()
    finish(run, 3)
    assert curve(metrics_of(run)) == curve(metrics_of(pair))
    assert weights(run) == weights(pair)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_costs_an_attempt_not_the_job(
    rank: int, material: Material, teacher: str, pair: RunDirectory, tmp_path: Path
) -> None:
    """The surviving process notices first and must not report it as a failure of the job."""
    from tests.student_trainer.tiny import curve, job

    run = new_run(tmp_path / "run", job(material, teacher, **PAIR))
    with trainer(run, dying=rank, failpoint="step-done:kill:5") as process:
        assert isinstance(process, Forked)
        code = process.wait_for_survivor(1 - rank)
    verdict = verdict_of(JobState.RUNNING, 5, run.read_status(), Exited(code))
    assert isinstance(verdict, DeadAttempt), verdict
    assert not verdict.blameless
    assert "another process of the trainer has died" in verdict.reason
    finish(run, 2)
    assert curve(metrics_of(run)) == curve(metrics_of(pair))
    assert weights(run) == weights(pair)

"""A run whose student gets worse keeps its best checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from clients.jobs.artifacts import pull_run
from clients.runs.directory import RunDirectory
from tests.end_to_end.forked_trainer import finish
from tests.end_to_end.processes import metrics_of, new_run

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material


def test_it_is_kept_besides_the_newest(material: Material, teacher: str, tmp_path: Path) -> None:
    from tests.student_trainer.tiny import job

    train_options = {"learning_rate": 0.1, "schedule": "constant", "warmup_steps": 0}
    changes = {f"train__{key}": value for key, value in train_options.items()}
    intervals = {"eval__every": 1, "checkpoint__every": 1}
    run = finish(
        new_run(tmp_path / "run", job(material, teacher, max_steps=8, **changes, **intervals))
    )
    kl_by_step = {line["step"]: line["eval/kl"] for line in metrics_of(run)}
    best = min(range(1, 9), key=kl_by_step.__getitem__)
    assert best < 7, "it got better to the end"
    assert RunDirectory(run.path).checkpoint_steps() == (best, 7, 8)
    pulled = pull_run(run.path, tmp_path / "best", checkpoint="best")
    weights = "model/model.safetensors"
    assert (pulled / weights).read_bytes() == (run.checkpoint(best) / weights).read_bytes()

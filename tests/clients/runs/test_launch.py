"""A job's program, its launcher and its ranks import nothing from the working directory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from clients.runs.directory import RunDirectory
from clients.runs.launch import trainer_command
from student_trainer.rewards import RewardSample, make_rewards
from tests.student_trainer import tiny


def plant_module(directory: Path) -> Path:
    """Write a `random.py`, which torch imports; return the path of the file that it creates."""
    imported_marker = directory / "imported"
    (directory / "random.py").write_text(
        f"open({str(imported_marker)!r}, 'w'); raise SystemExit(99)\n"
    )
    return imported_marker


@pytest.mark.parametrize("processes", [1, 2])
def test_a_module_in_the_working_directory_is_not_imported(tmp_path: Path, processes: int) -> None:
    material = tiny.Material.at(tmp_path / "missing")
    config = tiny.job(material, train__processes=processes)
    run = RunDirectory.create(tmp_path / "run", config)
    directory = tmp_path / "place"
    directory.mkdir()
    imported_marker = plant_module(directory)
    command = trainer_command(run.path, attempt=1, processes=processes)
    process = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300)
    assert not imported_marker.exists()
    assert process.returncode != 0
    status = run.read_status()
    assert status is not None, process.stderr
    assert status.reason.startswith("student.model: "), "the trainer looked at its job"


def test_a_judge_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported_marker = plant_module(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = tiny.rl_job(tiny.Material.at(tmp_path)).reward
    assert config is not None
    with make_rewards(config) as rewards:
        assert rewards([RewardSample("", "a 1")]).values.tolist() == [1.0]
    assert not imported_marker.exists()

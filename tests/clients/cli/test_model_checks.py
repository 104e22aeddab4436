"""Commands that read a job file check the model directories that it names on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from clients.cli.app import main

JOB = 'student.model = "{student}"\nteacher.model = "{teacher}"\ndata.path = "data.jsonl"\n'
COMMANDS = (["config", "check"], ["preview"], ["run", "--runs", "runs"])


def write_model(path: Path, **config: object) -> Path:
    """Write a directory that passes: a check reads no numbers."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json"):
        (path / name).touch()
    return path


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("key", ["student", "teacher"])
def test_an_adapter_is_refused(
    command: Sequence[str],
    key: str,
    job_file: Callable[..., str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "1"}\n' * 20)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "a/base"}')
    models = {"student": "org/model", "teacher": "org/model", key: str(adapter)}
    arguments = [*command, job_file(JOB.format(**models))]
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert f"{key}.model: " in errors
    assert "is an adapter of a/base, not a model" in errors
    assert "student_trainer.tools.convert" in errors
    assert not (tmp_path / "runs").exists()


def test_what_a_quantised_teacher_returns_is_told(
    job_file: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = write_model(tmp_path / "fp8", quantization_config={"quant_method": "fp8"})
    assert main(["config", "check", job_file(JOB.format(student="org/m", teacher=teacher))]) == 0
    assert "are quantised (fp8): its rows include the error" in capsys.readouterr().err

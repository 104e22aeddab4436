from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

MINIMAL = """\
student.model = "org/model"
teacher.address = "localhost:1"
data.path = "org/data"
"""


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run each test in its own directory, for short paths in messages, and without settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISTILL_SERVER", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.fixture
def job_file(tmp_path: Path) -> Callable[..., str]:
    """Writes a job file and returns its name, relative to the current directory."""

    def write(text: str = MINIMAL, name: str = "job.toml") -> str:
        (tmp_path / name).write_text(text)
        return name

    return write

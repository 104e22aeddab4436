from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.teacher_service.processes import TeacherProcess


class StartTeacher(Protocol):
    def __call__(
        self, *args: str, port: int = 0, launched: bool = False, **options: str
    ) -> TeacherProcess: ...


@pytest.fixture
def start_teacher(tmp_path: Path) -> Iterator[StartTeacher]:
    """Starts teachers; what still runs at the end of the test is killed."""
    started: list[TeacherProcess] = []

    def start(*args: str, port: int = 0, launched: bool = False, **options: str) -> TeacherProcess:
        # No test may read or fill the user's own cache.
        if "--cache-dir" not in args:
            args = (*args, "--no-cache")
        log = tmp_path / "teacher.log"
        started.append(TeacherProcess(args, log=log, port=port, launched=launched, **options))
        return started[-1]

    yield start
    for teacher in started:
        teacher.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.teacher_service.tiny_model import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same shapes as `tiny_model`."""
    from tests.teacher_service.tiny_model import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("other_model"), seed=1)

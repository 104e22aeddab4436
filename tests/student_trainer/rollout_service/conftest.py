from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.student_trainer import tiny
from tests.student_trainer.rollout_service.material import student
from tests.student_trainer.rollout_service.processes import ServiceProcess


class StartService(Protocol):
    def __call__(self, *args: str, port: int = 0, failpoint: str = "") -> ServiceProcess: ...


@pytest.fixture(scope="session")
def student_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a student before its first step."""
    return tiny.save(student(0), tiny.tokenizer(), tmp_path_factory.mktemp("student"))


@pytest.fixture
def start_service(tmp_path: Path, student_path: Path) -> Iterator[StartService]:
    """Starts rollout services, and kills them at the end of the test."""
    services: list[ServiceProcess] = []

    def start_process(*args: str, port: int = 0, failpoint: str = "") -> ServiceProcess:
        if "--model" not in args:
            args = ("--model", str(student_path), *args)
        log = tmp_path / "service.log"
        services.append(ServiceProcess(*args, log=log, port=port, failpoint=failpoint))
        return services[-1]

    yield start_process
    for service in services:
        service.close()

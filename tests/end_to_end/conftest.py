"""Shared by all tests: models, a teacher per test worker, and runs without interruption."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clients.runs.directory import RunDirectory
from tests.end_to_end.forked_teacher import ForkedTeacher
from tests.end_to_end.forked_trainer import finish
from tests.end_to_end.processes import MakeServer, RealServer, new_run

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material


def teacher_arguments(material: Material) -> list[str]:
    return ["--model", str(material.teacher), "--batch-invariant", "--no-cache"]


Once = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Returns a directory that the first test worker makes, and all test workers use."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def make_once(name: str, make: Callable[[Path], object]) -> Path:
        path = root / name
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (path / "whole").exists():
                make(path)
                (path / "whole").touch()
        return path

    return make_once


@pytest.fixture(scope="session")
def material(once: Once) -> Material:
    from tests.student_trainer.tiny import Material, save_material

    return Material.at(once("material", save_material))


@pytest.fixture(scope="session")
def teacher(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a shared teacher, which tests must not stop."""
    log = tmp_path_factory.mktemp("teacher") / "teacher.log"
    process = ForkedTeacher(teacher_arguments(material), log=log)
    yield process.address
    process.close()


@pytest.fixture(scope="session")
def undisturbed(material: Material, teacher: str, once: Once) -> RunDirectory:
    """The run that every interrupted run of the same job must equal, bit by bit."""
    from tests.student_trainer.tiny import job

    return RunDirectory(
        once("undisturbed", lambda path: finish(new_run(path, job(material, teacher))))
    )


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[MakeServer]:
    servers: list[RealServer] = []

    def start_server(
        slots: int = 1, runs: Path = tmp_path / "runs", arguments: Sequence[str] = ()
    ) -> RealServer:
        servers.append(RealServer(runs, slots, arguments=arguments))
        servers[-1].start()
        return servers[-1]

    yield start_server
    for server in servers:
        server.clean_up()

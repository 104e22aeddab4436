"""The packages are layered: imports in one direction, without circles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.structure import PACKAGES, Folder, folders_of, ranks_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folders() -> list[Folder]:
    return folders_of(ROOT)


def test_there_is_something_to_check(folders: list[Folder]) -> None:
    assert {folder.name for folder in folders} >= set(PACKAGES)
    assert sum(len(folder.arrows) for folder in folders) > 100


def test_no_circle(folders: list[Folder]) -> None:
    assert {folder.name: folder.circles for folder in folders if folder.circles} == {}


def test_no_upward_import(folders: list[Folder]) -> None:
    assert {folder.name: folder.upward for folder in folders if folder.upward} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_wing_has_its_place(package: str, folders: list[Folder]) -> None:
    """The contracts of `.importlinter` order every room of a package."""
    (folder,) = (folder for folder in folders if folder.name == package)
    ordered = {name for name in ranks_of(ROOT) if name.rpartition(".")[0] == package}
    assert ordered >= {f"{package}.{room}" for room in folder.rooms} - {f"{package}.__main__"}


def test_a_circle_is_found(tmp_path: Path) -> None:
    wing = tmp_path / "clients"
    wing.mkdir()
    (wing / "a.py").write_text("from clients.b import x\n")
    (wing / "b.py").write_text("def f():\n    import clients.c\n")
    (wing / "c.py").write_text("from clients import a\n")
    (folder,) = folders_of(tmp_path)
    assert folder.circles == [{"a", "b", "c"}]

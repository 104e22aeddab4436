"""The packages are layered: imports in one direction, without circles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.structure import PACKAGES, folders_of, ranks_of

ROOT = Path(__file__).parents[2]
FOLDERS = folders_of(ROOT)


def test_there_is_something_to_check() -> None:
    assert {folder.name for folder in FOLDERS} >= set(PACKAGES)
    assert sum(len(folder.arrows) for folder in FOLDERS) > 100


def test_no_circle() -> None:
    assert {folder.name: folder.circles for folder in FOLDERS if folder.circles} == {}


def test_no_upward_import() -> None:
    assert {folder.name: folder.upward for folder in FOLDERS if folder.upward} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_wing_has_its_place(package: str) -> None:
    """The contracts of `.importlinter` order every room of a package."""
    (folder,) = (folder for folder in FOLDERS if folder.name == package)
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

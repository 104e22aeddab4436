"""The packages stay in wings: few modules per folder, one direction of imports, no circle."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.structure import MAX_MODULES, PACKAGES, Folder, folders_of, ranks_of

ROOT = Path(__file__).parents[2]
FOLDERS = folders_of(ROOT)


def name_of(folder: Folder) -> str:
    return folder.name


def test_there_is_something_to_check() -> None:
    assert {folder.name for folder in FOLDERS} >= set(PACKAGES)
    assert sum(len(folder.arrows) for folder in FOLDERS) > 100


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_a_folder_can_be_taken_in_at_a_glance(folder: Folder) -> None:
    if folder.name != "student_trainer.losses":  # one loss per file
        assert folder.modules <= MAX_MODULES


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_no_circle(folder: Folder) -> None:
    assert folder.circles == []


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_no_upward_import(folder: Folder) -> None:
    assert folder.upward == frozenset()


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

"""docs/architecture.md: every file and folder that it names exists, and every folder is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.structure import PACKAGES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("|") and "`" in line]


def paths_in_row(row: str) -> list[Path | None]:
    """Return the paths of a row, None for one that does not exist.

    A bare name is relative to the previous path or its parent.
    """
    paths: list[Path | None] = []
    previous_path = ROOT
    for name in re.findall(r"`([\w./]+(?:\.py|/\w*))`", row):
        places = [
            ROOT / name,
            previous_path.parent / name,
            previous_path / name,
            previous_path.parents[1] / name,
        ]
        path = next((place for place in places if place.exists()), None)
        paths.append(path)
        previous_path = path or previous_path
    return paths


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_every_path_exists(row: str) -> None:
    assert None not in paths_in_row(row), row


def test_there_is_something_to_check() -> None:
    assert sum(len(paths_in_row(row)) for row in ROWS) > 100


@pytest.mark.parametrize("package", PACKAGES)
def test_every_wing_is_named(package: str) -> None:
    wings = {str(path.parent.relative_to(ROOT)) for path in (ROOT / package).glob("*/__init__.py")}
    assert {wing for wing in wings if f"| `{wing}`" not in PAGE} == set()

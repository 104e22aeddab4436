"""The definitions that the report follows exist, each in one file."""

from __future__ import annotations

import pytest

from tests.architecture.report import READING_PATHS, files_defining
from tests.architecture.sources import PRODUCT


@pytest.mark.parametrize("path", READING_PATHS)
def test_each_definition_is_in_one_file(path: str) -> None:
    files = files_defining(READING_PATHS[path], PRODUCT)
    assert {name: places for name, places in files.items() if len(places) != 1} == {}

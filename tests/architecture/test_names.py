"""Names say what a value is: participles and pronouns stay rare, a class name is in one package."""

from __future__ import annotations

import pytest

from tests.architecture.report import classes_in_two_packages, empty_names
from tests.architecture.sources import PACKAGES, PRODUCT, python_files

MAX_SHARE = 0.005


@pytest.mark.parametrize("folders", [PACKAGES, ("tests",), ("benchmarks",)], ids=lambda f: f[0])
def test_names_that_say_nothing_are_rare(folders: tuple[str, ...]) -> None:
    names, total = empty_names(python_files(*folders))
    assert names.total() <= MAX_SHARE * total, names.most_common(20)


def test_no_class_name_stands_in_two_packages() -> None:
    assert classes_in_two_packages(PRODUCT) == {}

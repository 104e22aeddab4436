"""docs/faults.md: it has every row of the fault plan, and every test that it names exists."""

from __future__ import annotations

import ast
import re

from tests.architecture.faults_page import with_tiers
from tests.architecture.sources import ROOT

PAGE = (ROOT / "docs" / "faults.md").read_text()
LAST = {"T": 18, "C": 10, "J": 22, "R": 6, "S": 11}


def test_every_row_is_there() -> None:
    rows = set(re.findall(r"^\| ([TCJRS]\d+) \|", PAGE, re.MULTILINE))
    assert rows == {
        f"{kind}{n}" for kind, last_number in LAST.items() for n in range(1, last_number + 1)
    }


def test_every_test_that_is_named_exists() -> None:
    named_tests = set(re.findall(r"`([a-z_0-9/]+\.py)::(\w+)`", PAGE))
    assert len(named_tests) == len(set(re.findall(r"`[^`]*::[^`]*`", PAGE)))
    assert len(named_tests) > 80
    for path, name in sorted(named_tests):
        tree = ast.parse((ROOT / "tests" / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, path


def test_a_row_without_a_test_says_so() -> None:
    for row in re.findall(r"^\| [TCJRS]\d+ \|.*$", PAGE, re.MULTILINE):
        assert "::test_" in row.split("|")[4] or "**not shown**" in row, row


def test_every_row_says_its_tier() -> None:
    """`python -m tests.architecture.faults_page` writes the column from the tests' marks."""
    assert with_tiers(PAGE) == PAGE

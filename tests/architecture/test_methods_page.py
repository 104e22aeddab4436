"""docs/methods.md: every function and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "methods.md").read_text()
LOSSES = "student_trainer/losses/"


def defined_names(path: Path) -> set[str]:
    kinds = ast.FunctionDef | ast.ClassDef
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, kinds)}


def test_every_test_that_is_named_exists() -> None:
    named_tests = set(re.findall(r"`([a-z_0-9/]+\.py)::(\w+)`", PAGE))
    assert len(named_tests) == len(set(re.findall(r"`[^`]*::[^`]*`", PAGE))) > 12
    for path, name in sorted(named_tests):
        folder = "" if "/" in path else LOSSES
        assert name in defined_names(ROOT / "tests" / folder / path), f"{path}::{name}"


def test_every_function_that_is_named_exists() -> None:
    functions = set(re.findall(r"^\| `(\w+)` \|.*`[a-z_0-9/]+\.py::\w+` \|$", PAGE, re.MULTILINE))
    assert len(functions) > 12
    all_names: set[str] = set().union(*map(defined_names, (ROOT / "student_trainer").rglob("*.py")))
    assert functions <= all_names
    loss_functions = re.findall(r"\| `(\w+)` \|$", PAGE.split("| method | keys |")[1], re.MULTILINE)
    assert set(loss_functions) <= functions, "a function without a test"

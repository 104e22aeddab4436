"""The column `tier` of docs/faults.md: the make target that runs the tests of a row.

    python -m tests.architecture.faults_page

writes it. Where a row has tests of several targets, all are named; where only some cases of a test
are marked `slow`, the others are in `make test`.
"""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.architecture.sources import ROOT

PAGE = ROOT / "docs" / "faults.md"
ROW = re.compile(r"^\| (?:id|[TCJRS]\d+) \|.*$", re.MULTILINE)
RULE = re.compile(r"^\|(?:---\|){5}$", re.MULTILINE)
# Make targets of tests that need more than `make test` installs, by prefix of their path.
TARGETS = {
    "vllm/": "test-vllm",
    "distill_server/runners/test_ray": "test-ray",
    "teacher_service/capture/test_ray": "test-ray",
    "distill_server/runners/test_slurm": "test-slurm",
    "deploy/monitoring/": "test-monitoring",
    "deploy/": "test-deploy",
}


@cache
def tree_of(path: str) -> ast.Module:
    """Return the parsed test file; `path` is relative to tests/."""
    return ast.parse((ROOT / "tests" / path).read_text())


def tiers_of_test(path: str, name: str) -> set[str]:
    """Return the targets that run the test `name` of the file."""
    for start, target in TARGETS.items():
        if path.startswith(start):
            return {target}
    tree = tree_of(path)
    marks = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    function = next(
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name
    )
    marks += [
        mark
        for mark in function.decorator_list
        if not ast.unparse(mark).startswith("pytest.mark.p")
    ]
    if any("pytest.mark.slow" in ast.unparse(mark) for mark in marks):
        return {"test-all"}
    cases = "".join(ast.unparse(mark) for mark in function.decorator_list)
    return {"test", "test-all"} if "slow" in cases.lower() else {"test"}


def with_tiers(page: str) -> str:
    """Return the page with the column `tier` after the column `test`."""

    def row_with_tier(row: re.Match[str]) -> str:
        cells = [cell.strip() for cell in row[0].strip("|").split("|")]
        tests = re.findall(r"`([a-z_0-9/]+\.py)::(\w+)`", cells[3])
        tiers = set().union(*(tiers_of_test(*test) for test in tests))
        tier = "tier" if cells[0] == "id" else ", ".join(sorted(tiers)) or "-"
        columns = (f" {cell} " if cell else " " for cell in (*cells[:4], tier, cells[-1]))
        return f"|{'|'.join(columns)}|"

    return ROW.sub(row_with_tier, RULE.sub("|" + 6 * "---|", page))


if __name__ == "__main__":
    PAGE.write_text(with_tiers(PAGE.read_text()))

"""The Python files of the repository, without generated code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("protos", "clients", "distill_server", "teacher_service", "student_trainer")


def python_files(*folders: str) -> list[Path]:
    """Return every Python file below `folders` of the repository, sorted."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in paths if "_pb2" not in path.name)


def relative_name(path: Path) -> str:
    """Return the path relative to the root of the repository."""
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


PRODUCT = python_files(*PACKAGES)
